"""The experiments of the paper's evaluation, one module each, and what they measure with."""
