"""Sterna: one LLM served by many engine instances, whose running requests move live.

An independent implementation of Llumnix (OSDI '24). The tree is the paper's architecture
figure: pure cores (`policy`, `migration`, `scheduler`, `instance`) decide and return effects as
data, which shells carry out; `runtime` has their processes. `docs/architecture.md` has the map.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sterna.cli.simulate.library import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    # Imported when it is used: every process of a server imports this package.
    if name == "simulate":
        from sterna.cli.simulate.library import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
