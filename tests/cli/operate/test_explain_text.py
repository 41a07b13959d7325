"""`sterna explain`: the sentences in which a history is shown."""

from typing import Any

import pytest

from sterna.cli.operate.explain_text import explained

CHOSEN = {
    "instance": "i1",
    "cost": 312.4,
    "num_running": 4,
    "num_waiting": 0,
    "room_tokens": 12_000.0,
    "freeness_steps": 300.0,
    "uncomputed_tokens": 0,
    "cached_tokens": 512,
}
OTHER = {**CHOSEN, "instance": "i3", "cost": None, "freeness_steps": None, "cached_tokens": 0}
WHY = {
    "rule": "soonest",
    "num_eligible": 2,
    "num_instances": 4,
    "held_s": 0.38,
    "prefix_from": None,
    "chosen": CHOSEN,
    "next_best": OTHER,
}
SHORT = {
    "cause": "memory",
    "source": 12.0,
    "destination": None,
    "limit": 48.0,
    "victim": "last_started",
}


def shown(*events: dict[str, Any], num_dropped: int = 0) -> list[str]:
    history = {
        "id": "cmpl-tern-0-9f86d081",
        "state": "finished",
        "instance": "i3",
        "frontend": 1,
        "class": "normal",
        "arrived_s": 1_700_000_000.5,
        "prompt_tokens": 700,
        "demand_tokens": 1_720,
        "output_tokens": 1_200,
        "events": [{"at_s": 0.25, **each} for each in events],
        "events_dropped": num_dropped,
    }
    headline, *lines = explained(history).splitlines()
    assert headline == "cmpl-tern-0-9f86d081 (class normal): finished on i3, 1,200 tokens"
    return lines


def test_a_dispatch_names_the_rule_the_chosen_and_the_next_best() -> None:
    assert shown({"event": "dispatched", "instance": "i1", "why": WHY}) == [
        "     0.250 s  dispatched to i1 after 0.380 s at the scheduler by the rule soonest, of 2 "
        "eligible of 4 instances",
        "              chosen     i1: cost 312, 4 running, 0 waiting, memory for 12,000 tokens, "
        "freeness 300 steps, 0 tokens to compute before, 512 of 700 prompt tokens cached",
        "              next best  i3: 4 running, 0 waiting, memory for 12,000 tokens, freeness "
        "unlimited steps, 0 tokens to compute before, 0 of 700 prompt tokens cached",
    ]
    alone = {
        **WHY,
        "num_eligible": 1,
        "num_instances": 1,
        "held_s": 0.0,
        "next_best": None,
        "prefix_from": "i2",
    }
    assert shown({"event": "dispatched", "instance": "i1", "why": alone})[:2] == [
        "     0.250 s  dispatched to i1 by the rule soonest, of 1 instance",
        "              a part of its prompt's KV cache was copied from i2 before",
    ]


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            {"event": "arrived"},
            "arrived at front end 1: 700 prompt tokens, 1,720 tokens of memory to begin",
        ),
        (
            {"event": "held", "cause": "memory", "room_tokens": 640.0},
            "held at the scheduler: no instance has more than 640 tokens of memory for a request",
        ),
        (
            {"event": "held", "cause": "memory", "room_tokens": 0.0},
            "held at the scheduler: no instance has memory for a request, or a place in its batch",
        ),
        (
            {"event": "held", "cause": "memory", "room_tokens": -384.0},
            "held at the scheduler: no instance has memory for a request, or a place in its batch",
        ),
        (
            {"event": "held", "cause": "prefix", "room_tokens": 1_720.0},
            "held at the scheduler: it waits for an instance that has its prefix",
        ),
        (
            {"event": "held", "cause": "kept free", "room_tokens": 1_720.0},
            "held at the scheduler: the memory that there is, is kept free for a request before it",
        ),
        (
            {"event": "held", "cause": "copy", "room_tokens": 0.0},
            "held at the scheduler: its prefix is being copied to its instance",
        ),
        (
            {"event": "dispatched", "instance": "i1", "why": None},
            "dispatched to i1 without the scheduler: it has the fewest requests of this front end",
        ),
        (
            {"event": "scheduled", "instance": "i1", "waited_s": 0.3},
            "scheduled on i1 after 0.300 s in its queue",
        ),
        ({"event": "first token", "cached_tokens": None}, "first token"),
        (
            {"event": "first token", "cached_tokens": 512},
            "first token; 512 prompt tokens were cached",
        ),
        (
            {"event": "preempted", "instance": "i1"},
            "preempted on i1, which had no memory left",
        ),
        ({"event": "resumed", "instance": "i1", "waited_s": 1.5}, "resumed on i1 after 1.500 s"),
        (
            {"event": "lost", "output_tokens": 40},
            "sent again, behind the 40 tokens that its client has",
        ),
        ({"event": "failed", "reason": "it is too large"}, "failed: it is too large"),
        (
            {"event": "aborted", "reason": None},
            "aborted: its client has gone, or has all that it asked for",
        ),
        ({"event": "finished", "reason": None}, "finished"),
        ({"event": "sang", "song": "tern"}, "sang {'song': 'tern'}"),
    ],
)
def test_each_event_is_a_sentence(event: dict[str, Any], sentence: str) -> None:
    assert shown(event) == [f"     0.250 s  {sentence}"]


@pytest.mark.parametrize(
    ("why", "because"),
    [
        (None, "because an operator ordered it"),
        (
            SHORT,
            "because i1 is short of memory: freeness 12 steps, below 48; i3 has unlimited; the "
            "first to move: last started",
        ),
        (
            {**SHORT, "cause": "balance", "source": 9_000, "destination": 5_000.0, "limit": 1.2},
            "because i1 has 9,000 tokens of load, more than 1.2 times the 5,000 that i3 will have; "
            "the first to move: last started",
        ),
        (
            {**SHORT, "cause": "emptying", "source": None, "destination": 30.0},
            "because i1 is being emptied; i3 has a freeness of 30 steps; the first to move: last "
            "started",
        ),
        (
            {**SHORT, "cause": "tides"},
            "because i1 was paired with i3 (tides); the first to move: last started",
        ),
    ],
)
def test_a_move_says_why(why: dict[str, Any] | None, because: str) -> None:
    event = {
        "event": "moved",
        "from": "i1",
        "to": "i3",
        "stages": 2,
        "suspended_s": 0.0064,
        "why": why,
    }
    assert shown(event) == [
        "     0.250 s  moved from i1 to i3 in 2 stages, paused for 6.4 ms",
        f"              {because}",
    ]
    refused = {**event, "event": "did not move", "outcome": "no_memory"}
    assert shown(refused)[0] == "     0.250 s  did not move from i1 to i3: no memory"


def test_it_is_said_when_events_were_not_kept() -> None:
    assert shown(num_dropped=7) == ["              (7 further events were not kept)"]
