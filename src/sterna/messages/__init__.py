"""The messages between actors, except KV bytes, as msgspec structs. Pure.

`actors` has those of requests, load, migration and membership, `streams` those of resumable
streams.

Offers: actors, streams.
Imports: migration.messages, types.
"""
