"""Headroom shares: the part of the headrooms that the cluster can afford. Pure.

Departure from the paper, in which a headroom does not depend on the other instances (Algorithm 1,
line 7). It is taken from the normal requests that would run there, and on few or full instances
these have nowhere to go: with two instances one high-priority request sends all of them to the
other, where they wait for memory, and slow each other, while the first is nearly empty. So a
headroom counts by a share, the same for all instances, which has two limits:

- the batches in which normal requests run grow by at most `MAX_GROWTH` in the mean. This allows
  the whole headroom of one instance among many, and two fifths of it for one of two;
- the headrooms are at most the free memory of the instances without one: normal requests that would
  have to queue there run beside high-priority ones instead.

Freeness is balanced when an instance that gives d of its memory as headroom has 1 - d of the batch
of the others. If a part p of the instances gives d, the batch of a normal request is larger in the
mean than with equal batches by

    p * (1 - p) * d^2 / (1 - p * d)^2

which is the variance of the batches over the square of their mean: it grows with the square of d,
while the gain of high-priority requests grows with d itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from sterna.policy.virtual_usage import Candidate

MAX_GROWTH = 0.06
"""Growth of the batches in which normal requests run, while high-priority ones run elsewhere."""


def shared(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The instances, with the share for those that have headrooms.

    Terminating instances do not count in the share: they take no requests.
    """
    hosts = [each for each in candidates if each.headrooms_tokens > 0]
    if not hosts:
        return tuple(candidates)
    share = _share(candidates)
    return tuple(
        replace(each, headroom_share=share) if each.headrooms_tokens > 0 else each
        for each in candidates
    )


def _share(candidates: Sequence[Candidate]) -> float:
    staying = [each for each in candidates if not each.load.is_terminating]
    givers = [each for each in staying if each.headrooms_tokens > 0]
    if not givers:
        return 1.0
    others = [each for each in staying if each.headrooms_tokens == 0]
    headrooms_tokens = sum(each.headrooms_tokens for each in givers)
    room_tokens = sum(_room_tokens(each) for each in others)
    total_tokens = sum(each.load.total_tokens for each in givers)
    bearable_tokens = _bearable_part(len(givers) / len(staying)) * total_tokens
    return min(1.0, bearable_tokens / headrooms_tokens, room_tokens / headrooms_tokens)


def _bearable_part(giving: float) -> float:
    """The part of their memory that instances may give so that batches grow by MAX_GROWTH; above 1
    if batches would grow by less even with all of it.

    Args:
        giving: the part of the instances that give, above 0, at most 1. At 1 batches are equal; the
            share is 0 then, since no other instance has room.
    """
    growth = sqrt(MAX_GROWTH)
    return growth / (sqrt(giving * (1.0 - giving)) + giving * growth)


def _room_tokens(candidate: Candidate) -> float:
    in_flight_tokens = sum(request.demand_tokens for request in candidate.in_flight)
    return max(0.0, candidate.load.normal_free_tokens - in_flight_tokens)
