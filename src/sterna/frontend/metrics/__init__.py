"""The metrics of a front end, as Prometheus reads them, the latencies of its requests, and their
traces.

Offers: allocated_files, latencies, prometheus, traces.
Imports: folders, messages, metrics, types.
"""
