"""What a run records of its requests and of the cluster, and the summaries of that. Pure.

Offers: records, summary.
Imports: types.
"""
