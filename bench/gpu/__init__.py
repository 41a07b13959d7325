"""Results of a machine with a CUDA device: the tables of docs/gpu.md."""
