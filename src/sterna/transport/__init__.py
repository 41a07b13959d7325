"""KV bytes between instances (Section 5): block fusion, chunks, pacing, and the wires."""
