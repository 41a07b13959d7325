"""Tests of `sterna serve` as its users see it: a process, a port, and what it prints."""
