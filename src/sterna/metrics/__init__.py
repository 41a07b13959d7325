"""Records of a run, of its requests and of the cluster, and their summaries. Pure.

Offers: records, summary.
Imports: types.
"""
