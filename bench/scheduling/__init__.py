"""Costs of scheduling: the scheduler's decisions, load reports and rounds, alone and between
processes; and the stalls between the steps of engines."""
