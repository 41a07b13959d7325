"""Sterna beside plain vLLM: the same model, options and requests, one server after the other."""
