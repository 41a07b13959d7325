"""The costs of Sterna's processes: processor time of front ends and of explanations, and memory."""
