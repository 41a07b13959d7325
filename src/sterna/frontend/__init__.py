"""The OpenAI API: vLLM's own server over instances that Sterna schedules.

A request passes `http` (the door), `vllm_server` (vLLM's server, and the router that stands in for
the engine beneath it) and `requests` (the pure core, which decides). `resumable` holds streams that
outlive a front end, `operators` the administrators' routes, `metrics` what Prometheus reads.
`peers` knows the other actors' addresses.

Offers: peers.
Imports: errors, messages, messaging, types.
"""
