"""`sterna bench migration`: downtime and cost of migrations between two real instances."""
