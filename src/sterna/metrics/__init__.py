"""What came of the requests: records of single runs, and their summaries."""
