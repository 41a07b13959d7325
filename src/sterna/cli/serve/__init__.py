"""`sterna serve`: its options, the cluster that they describe, and its start."""
