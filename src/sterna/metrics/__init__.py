"""Records of a run: its requests and its cluster, and summaries of both. Pure.

Offers: records, summary.
Imports: types.
"""
