"""What all benchmarks share: result files, pages, the command line, the state of the machine."""
