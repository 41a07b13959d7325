"""The front door: what an HTTP request passes before vLLM's application answers it."""
