"""Reasons of decisions, for operators: why a request went to an instance, and why it moved. Pure.

The scheduler sends them with its decisions, and the front end of a request keeps them in the
request's history (`frontend.requests.histories`). No decision is made by them. Operators see them
in fields that are stable (docs/operations/explain.md).
"""

import math
from enum import Enum
from typing import Any

import msgspec
from msgspec import structs

from sterna.types import InstanceId


class InstanceSeen(msgspec.Struct, frozen=True, array_like=True):
    """An instance as a decision about one request saw it.

    Attributes:
        cost: that by which the rule compares instances, the smallest first, in its own unit; None
            if it compares otherwise.
        num_running: requests in its batch.
        num_waiting: requests that queue there or are on their way there.
        room_tokens: memory beyond all that these requests have and need.
        freeness_steps: see Section 4.4.3.
        uncomputed_tokens: prompt tokens to compute there before this request.
        cached_tokens: tokens of this request's prompt in its prefix cache.
    """

    instance_id: InstanceId
    cost: float | None
    num_running: int
    num_waiting: int
    room_tokens: float
    freeness_steps: float
    uncomputed_tokens: int
    cached_tokens: int


class DispatchReason(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a request goes to an instance.

    Attributes:
        rule: the policy's rule of dispatch, or `headroom`.
        num_eligible: the instances among which the rule chose: others have no memory for the
            request or no freeness, are being emptied, or the rule leaves them out (`power_of_two`
            draws two; a high-priority request joins others of its priority).
        num_instances: all.
        other: the instance that the rule prefers among the rest; None if there is no other, or a
            custom policy class decides.
        held_s: time for which the request waited at the scheduler.
        prefix_from: the instance from which a part of the prompt's KV cache was copied before.
    """

    rule: str
    num_eligible: int
    num_instances: int
    chosen: InstanceSeen
    other: InstanceSeen | None
    held_s: float
    prefix_from: InstanceId | None = None


class HeldCause(Enum):
    """What a request waits for at the scheduler."""

    MEMORY = "memory"
    """No instance has memory for it, or a place in its batch."""
    KEPT_FREE = "kept free"
    """An instance would have memory, which is kept free for another request."""
    PREFIX = "prefix"
    """Instances have memory, but not those that have its prefix."""
    COPY = "copy"
    """It has an instance, to which its prefix is being copied."""


class MoveCause(Enum):
    """What makes requests move away from an instance."""

    MEMORY = "memory"
    """It is short of memory: its freeness is below a limit."""
    HEADROOM = "headroom"
    """It would not be, but it keeps memory free beside requests of high priority."""
    PREEMPTION = "preemption"
    """Its engine has preempted requests for lack of memory."""
    EMPTYING = "emptying"
    """It is being emptied, to end."""
    BALANCE = "balance"
    """It has more load than another one will have with the request."""
    POLICY = "policy"
    """A custom policy class has paired it."""


class MoveReason(msgspec.Struct, frozen=True, array_like=True):
    """The reason why requests move from one instance to another.

    Attributes:
        source, destination: freeness in decode steps; for `BALANCE`, the load in tokens of the
            source, and of the destination with the request.
        limit: freeness below which an instance is a source; for `BALANCE`, the ratio of these loads
            above which requests move.
        victim: which of the source's requests move first.
    """

    cause: MoveCause
    source: float
    destination: float
    limit: float
    victim: str


def described_dispatch(reason: DispatchReason) -> dict[str, Any]:
    """The fields that operators see."""
    return {
        "rule": reason.rule,
        "num_eligible": reason.num_eligible,
        "num_instances": reason.num_instances,
        "held_s": round(reason.held_s, 6),
        "prefix_from": reason.prefix_from,
        "chosen": _described_seen(reason.chosen),
        "next_best": None if reason.other is None else _described_seen(reason.other),
    }


def described_move(reason: MoveReason) -> dict[str, Any]:
    """The fields that operators see."""
    facts = structs.asdict(reason)
    facts["cause"] = reason.cause.value
    return {name: finite(each) for name, each in facts.items()}


def finite(value: Any) -> Any:
    """None for an infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _described_seen(seen: InstanceSeen) -> dict[str, Any]:
    facts = structs.asdict(seen)
    facts["instance"] = facts.pop("instance_id")
    return {name: finite(each) for name, each in facts.items()}
