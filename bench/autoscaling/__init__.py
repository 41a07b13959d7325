"""Instances that come and go: auto-scaling, drains and restarts, the start of one more."""
