"""Streams that a client may leave and read on, at any front end (`--resumable-streams`).

`middleware` answers clients; `runs` are its answers, and `event_log` their events. `pacing` keeps a
record of each stream in step with its replica at another front end (`records`, `replicas`,
`telling`; `paced` tells it how far vLLM's code is), so that the stream outlives its own. `relays`
and `search` read a stream where it is. `exchange` joins these, and speaks with other front ends.
"""
