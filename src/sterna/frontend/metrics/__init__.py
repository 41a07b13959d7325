"""The metrics of a front end, as Prometheus reads them, and the latencies of its requests.

Offers: allocated_files, latencies, prometheus.
Imports: messages, types.
"""
