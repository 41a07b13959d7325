"""Descriptions of decisions in one line each, for `sterna top` and the dashboard. Pure.

A decision is an entry of `/admin/recent`: an event of a request's history (docs/operations/
explain.md) with the request and the time. `sterna explain` has the whole text.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Decision = dict[str, Any]

Entry = TypeVar("Entry")

DISPATCHED = "dispatched"
"""The event that is far more frequent than all others."""

_CAUSES = {
    "memory": "freeness {source} below {limit}",
    "headroom": "it keeps memory free for high priority: freeness {source} below {limit}",
    "preemption": "after a preemption there",
    "emptying": "it is being emptied",
    "balance": "load {source}, there {destination}",
    "policy": "by the policy",
}


def newest(
    entries: Sequence[Entry], num_entries: int, event_of: Callable[[Entry], str]
) -> list[Entry]:
    """The last entries, in their order; dispatches only where there are no others."""
    is_dispatch = [event_of(each) == DISPATCHED for each in entries]
    others = [place for place, is_one in enumerate(is_dispatch) if not is_one]
    kept = others[max(0, len(others) - num_entries) :]
    dispatches = [place for place, is_one in enumerate(is_dispatch) if is_one]
    kept += dispatches[max(0, len(dispatches) - (num_entries - len(kept))) :]
    return [entries[place] for place in sorted(kept)]


def line_of(decision: Decision) -> str:
    """What was decided about the request and why, without its name."""
    match decision["event"]:
        case "dispatched":
            return f"to {decision['instance']} ({_dispatch_reason(decision['why'])})"
        case "moved":
            pause_ms = 1e3 * decision["suspended_s"]
            where = f"{decision['from']} to {decision['to']}"
            return f"moved {where}, paused {pause_ms:.1f} ms ({_move_reason(decision['why'])})"
        case "did not move":
            outcome = decision["outcome"].replace("_", " ")
            return f"not moved {decision['from']} to {decision['to']}: {outcome}"
        case "preempted":
            return f"preempted on {decision['instance']}"
        case "lost":
            return f"sent again behind {decision['output_tokens']} tokens"
        case "failed":
            return f"failed: {decision['reason']}"
        case other:
            return str(other)


def _dispatch_reason(why: Decision | None) -> str:
    if why is None:
        return "without the scheduler"
    chosen, other = why["chosen"], why["next_best"]
    reason = f"{why['rule']}{_cost(chosen)}"
    if chosen["cached_tokens"]:
        reason += f", {chosen['cached_tokens']} tokens cached"
    if other is not None:
        reason += f"; next {other['instance']}{_cost(other)}"
    if why["held_s"] >= 1e-3:
        reason += f"; held {why['held_s']:.2f} s"
    return reason


def _cost(seen: Decision) -> str:
    return "" if seen["cost"] is None else f" {_number(seen['cost'])}"


def _move_reason(why: Decision | None) -> str:
    if why is None:
        return "by an operator"
    cause = str(why["cause"])
    text = _CAUSES.get(cause, cause)
    return text.format(
        source=_number(why["source"]),
        destination=_number(why["destination"]),
        limit=_number(why["limit"]),
    )


def _number(value: float | None) -> str:
    return "unlimited" if value is None else f"{value:.0f}" if abs(value) >= 10 else f"{value:.3g}"
