"""KV blocks in memory: layout of the cache, chunks of a transfer, staging buffers.

Offers: chunks, layout, staging.
Imports: errors.
"""
