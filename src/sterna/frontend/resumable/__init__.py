"""Streams that a client may leave and read on, at any front end (`--resumable-streams`).

`middleware` answers clients and `event_log` keeps the events of their answers. `pacing` keeps a
stream in step with its replica at another front end, so that it outlives its own; `relays` and
`search` read a stream at the front end that has it. `exchange` joins these, and sends messages.
Nothing here is imported without the option.

Offers: exchange, middleware.
Imports: engine, errors, frontend.http, frontend.requests, messages, types.
"""
