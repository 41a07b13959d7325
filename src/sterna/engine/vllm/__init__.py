"""The real engine: vLLM, unpatched, through its own extension points."""
