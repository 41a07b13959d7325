"""The messages between actors, except KV bytes, as msgspec structs. Pure.

`actors` has those of requests, load, migration and membership, `reasons` the reasons that some of
these bring along, `streams` those of resumable streams.

Offers: actors, reasons, streams.
Imports: migration.messages, types.
"""
