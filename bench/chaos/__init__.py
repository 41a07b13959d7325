"""Faults on the processes of a real server, and their effect on its clients."""
