"""Costs of the scheduler: decisions, load reports and rounds, alone and between processes."""
