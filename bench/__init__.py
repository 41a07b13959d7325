"""Benchmarks: each module measures one thing and writes `bench/results/NAME.json`."""
