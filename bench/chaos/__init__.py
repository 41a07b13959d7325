"""Faults on the processes of a real server, and what its clients see of them."""
