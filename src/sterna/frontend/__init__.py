"""The OpenAI API: vLLM's own server over instances that Sterna schedules."""
