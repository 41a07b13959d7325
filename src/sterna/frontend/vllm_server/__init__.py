"""vLLM's OpenAI server and its engine-core client, unpatched, over the cluster in place of one
engine.

`server` builds and serves the application; `router` is the one engine that vLLM's client sees, and
carries out what `frontend.requests` decides; `prompt_hashes` hashes prompts for policies that look
at prefix caches.

Offers: server.
Imports: config, engine, engine.emulated, engine.vllm, errors, folders, frontend, frontend.http,
    frontend.metrics, frontend.operators, frontend.requests, frontend.resumable, messages,
    messaging, own_log, priority_classes, types.
"""
