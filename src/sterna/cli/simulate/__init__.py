"""`sterna simulate`: its options, and the tables and plots of runs, simulated or real."""
