"""The OpenAI API: vLLM's own server over instances that Sterna schedules.

`server` builds vLLM's server, `router` stands in for the engine beneath it and carries out what
the pure cores decide: `dispatch` (which instance gets a request), `ownership` (which has it, also
after deaths) and `streams` (each token once, in order). `admin` adds the operators' routes.
"""
