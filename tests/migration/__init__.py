"""Tests of live migration (Section 4.2)."""
