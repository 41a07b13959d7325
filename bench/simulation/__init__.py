"""The simulator's speed and fidelity, the fault simulation, and the model of the handshake."""
