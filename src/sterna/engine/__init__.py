"""Inference engines, behind the one interface that an instance's shell drives.

`interface` has that interface, `kv_memory` the memory that requests need, `kv_columns` the parts of
it that a migration copies, `cache_changes` what a prefix cache gets and loses, and `payload_parts`
what is read in payloads without knowing vLLM's types; `cpu_cores` has the cores of engines on CPU,
`ended_outputs` the lengths of outputs that have ended, and `model_files` what this machine has of a
model.
The engines are in `vllm` (the real one) and `emulated`.

Offers: cache_changes, cpu_cores, drains, ended_outputs, interface, kv_columns, kv_memory,
model_files, payload_parts.
Imports: folders, messages, migration.messages, types.
"""
