"""Costs of scheduling: the scheduler's decisions, load reports and rounds, alone and between
processes; the stalls between the steps of engines; and what explanations of decisions take."""
