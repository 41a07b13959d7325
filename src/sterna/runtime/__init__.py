"""Processes: Ray actors that host the cores' shells, and what starts, watches and replaces them.

Offers: nothing.
Imports: nothing.
"""
