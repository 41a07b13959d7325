"""The small real model that `make serve` and the tests serve: SmolLM2-135M-Instruct.

It comes from the package index as a GGUF file and is converted once, into the cache.

Offers: small_model.
Imports: errors, sterna.
"""
