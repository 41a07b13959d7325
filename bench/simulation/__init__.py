"""The simulator: its speed, its faults found and planted, its model, its fidelity to the paper."""
