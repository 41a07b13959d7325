"""Sterna: one LLM served by many engine instances, whose running requests move live.

An independent implementation of Llumnix (OSDI '24). The tree is the paper's architecture
figure: pure cores (`policy`, `migration`, `global_scheduler`, `llumlet`) decide and return
effects as data; `runtime` carries them out on real engines. `docs/architecture.md` has the map.
"""
