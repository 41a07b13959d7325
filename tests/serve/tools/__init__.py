"""Other projects' load generators and evaluations, run as docs/benchmarking.md says."""
