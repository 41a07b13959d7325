"""Decisions in one line each."""

import pytest

from sterna.dashboard.decisions import line_of, newest

CHOSEN = {"instance": "i1", "cost": 312.4, "cached_tokens": 512}
OTHER = {"instance": "i3", "cost": 0.25, "cached_tokens": 0}
WHY = {"rule": "soonest", "held_s": 0.0, "chosen": CHOSEN, "next_best": OTHER}
UNCOSTED = {**CHOSEN, "cost": None, "cached_tokens": 0}


def moved(**why: object) -> dict[str, object]:
    facts = {"event": "moved", "from": "i0", "to": "i1", "suspended_s": 0.0061}
    return {**facts, "why": why or None}


@pytest.mark.parametrize(
    ("text", "num", "kept"),
    [
        ("dmdd", 4, "dmdd"),
        ("dmdd", 2, "md"),
        ("mddd", 1, "m"),
        ("mmdm", 2, "mm"),
        ("ddd", 2, "dd"),
        ("", 2, ""),
    ],
)
def test_dispatches_are_kept_only_beside_all_others(text: str, num: int, kept: str) -> None:
    events = {"d": "dispatched", "m": "moved"}
    assert "".join(newest(text, num, events.__getitem__)) == kept


@pytest.mark.parametrize(
    ("decision", "line"),
    [
        (
            {"event": "dispatched", "instance": "i1", "why": WHY},
            "to i1 (soonest 312, 512 tokens cached; next i3 0.25)",
        ),
        (
            {
                **{"event": "dispatched", "instance": "i1"},
                "why": {**WHY, "chosen": UNCOSTED, "next_best": None, "held_s": 0.4},
            },
            "to i1 (soonest; held 0.40 s)",
        ),
        (
            {"event": "dispatched", "instance": "i1", "why": None},
            "to i1 (without the scheduler)",
        ),
        (moved(), "moved i0 to i1, paused 6.1 ms (by an operator)"),
        (
            moved(cause="memory", source=12.3, destination=None, limit=48.0),
            "moved i0 to i1, paused 6.1 ms (freeness 12 below 48)",
        ),
        (
            moved(cause="balance", source=5000.0, destination=None, limit=1.3),
            "moved i0 to i1, paused 6.1 ms (load 5000, there unlimited)",
        ),
        (
            moved(cause="of a newer server", source=1.0, destination=1.0, limit=1.0),
            "moved i0 to i1, paused 6.1 ms (of a newer server)",
        ),
        (
            {"event": "did not move", "from": "i0", "to": "i1", "outcome": "no_memory"},
            "not moved i0 to i1: no memory",
        ),
        ({"event": "preempted", "instance": "i2"}, "preempted on i2"),
        ({"event": "lost", "output_tokens": 17}, "sent again behind 17 tokens"),
        ({"event": "failed", "reason": "no instance left"}, "failed: no instance left"),
        ({"event": "of a newer server"}, "of a newer server"),
    ],
)
def test_a_decision_is_a_line(decision: dict[str, object], line: str) -> None:
    assert line_of(decision) == line
