"""The HTTP door of a front end: everything between a client's socket and vLLM's application.

`door` builds the whole chain of middlewares in one visible order; `routes` is the one table of
paths; `request_context` is what they tell each other about a request.

Offers: api_keys, body_limit, door, overload, queue_limit, request_context, request_errors,
    service_tier, shutdown_gate, slow_clients, tls.
Imports: config, errors, frontend.requests, messages, priority_classes, priority_files.
"""
