"""The pure core of a front end: which instance gets a request, which one has it, and what its
client has received. Pure.

`core` joins `dispatcher` (the instance for a new request), `ownership` (which instance has it, also
after moves and deaths), `token_streams` (each token once, in order) and `attempts` (what a request
needs to begin again elsewhere). `histories` remembers what happened, for operators.

Offers: core, histories, request_effects, request_ids.
Imports: config, dashboard, engine, messages, types.
"""
