"""Shared parts of all benchmarks: result files, pages, the command line, the machine's state."""
