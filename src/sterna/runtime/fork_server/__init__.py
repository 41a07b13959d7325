"""The fork server: starts instances as forks of a process that has vLLM imported already.

Offers: forked_worker, launcher.
Imports: engine.vllm, errors, folders, frontend.vllm_server, own_log, runtime.processes.
"""
