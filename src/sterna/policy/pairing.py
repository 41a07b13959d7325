"""Pairing: the choice of sources and destinations of migrations (Section 4.4.3, migration). Pure.

Pairing is level-triggered: each round gives the whole assignment, and an instance that it does not
name is not a source. It sees instances, never their requests (Section 4.3); the llumlet chooses
the request to move (`selection`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from msgspec import structs

from sterna.config import PolicyConfig
from sterna.errors import ConfigurationError
from sterna.policy.candidate_table import (
    IS_TERMINATING,
    NUM_REQUESTS,
    REAL_LOAD_TOKENS,
    ROOM_TOKENS,
    VIRTUAL_LOAD_TOKENS,
    CandidateTable,
    as_table,
)
from sterna.policy.virtual_usage import Candidate, headroom_tokens
from sterna.types import NORMAL, InstanceId, InstanceLoad


def pair(
    candidates: Iterable[Candidate],
    policy: PolicyConfig,
    kept_free: InstanceId | None = None,
    kv_formats: Mapping[InstanceId, str] = MappingProxyType({}),
) -> dict[InstanceId, InstanceId]:
    """The destination of each source, for this round; other instances are not sources.

    Sources are the instances below the source threshold that have a request to move;
    destinations those above the destination threshold that have a place in their batch: without
    one, a move is refused when all has been copied. A queuing request (`moves_queuing`) needs none:
    a full batch takes it where no other instance can. A terminating instance, with its freeness of
    minus infinity, is always a source and never a destination; and so, with
    `preempted_make_source`, is one in which preempted requests queue.

    A terminating instance that has been emptied for too long moves requests without their memory
    (`move_tokens` of 0), for which every destination has room: if no instance above the threshold
    is left, its destination is the freest one that is.

    The source of lowest freeness gets the destination of highest freeness, and so on; ties go
    to the smaller id. Each instance is in at most one pair, even if it may take part in several
    migrations at once (`num_concurrent_migrations`): these then have the same peer.

    A source whose move would not help (`move_helps`) is passed over, and the destination is
    left to the next one, with `pairs_only_to_gain`. A terminating one, which cannot wait, then gets
    the freest destination that has room instead; and none gets one whose whole memory is too small.

    With `balance_ratio`, those that are left are paired by their loads, the most loaded one with
    the least loaded one, among those with the same format of KV blocks: elsewhere all of a request
    would be computed again, which none of these moves is worth.

    A custom class that defines `pair` makes other pairs; but a terminating instance that has been
    emptied for too long gets a destination from here where the class names none, since its end was
    promised.

    Args:
        kept_free: an instance whose memory a waiting request will have: only terminating instances
            have it as their destination.
        kv_formats: of the instances; without any, all have the same.

    Raises:
        ConfigurationError: a custom class has made pairs that cannot be.
    """
    every = as_table(candidates)
    if not every:
        return {}
    if policy.own is not None and policy.own.makes_pairs:
        instances = tuple(every)
        own_pairs = checked_pairs(policy.own.pair(instances), instances)
        return own_pairs | _of_overstayed(instances, own_pairs)
    sources: list[Candidate] = []
    destinations: list[Candidate] = []
    full: list[Candidate] = []
    for each in every:
        has_lost_memory = policy.preempted_make_source and each.load.num_preempted > 0
        if each.freeness < policy.source_freeness_steps or has_lost_memory:
            if each.load.move_tokens is not None:
                sources.append(each)
        elif each.freeness > policy.destination_freeness_steps:
            (full if each.has_full_batch else destinations).append(each)
    if sources:
        sources.sort(key=lambda each: (each.freeness, each.instance_id))
        destinations.sort(key=lambda each: (-each.freeness, each.instance_id))
        full.sort(key=lambda each: (-each.freeness, each.instance_id))
    pairs: dict[InstanceId, InstanceId] = {}
    for source in sources:
        for left in (destinations, full) if source.load.moves_queuing else (destinations,):
            place = _place_for(source, left, policy, kept_free)
            if place is not None:
                pairs[source.instance_id] = left.pop(place).instance_id
                break
    pairs |= _of_overstayed(every, pairs)
    if policy.balance_ratio is not None:
        formats = sorted(set(kv_formats.values())) or [""]
        for kv_format in formats:
            out = pairs.keys() | set(pairs.values())
            if len(formats) > 1:
                ids = [each.instance_id for each in every]
                out |= {each for each in ids if kv_formats.get(each, formats[0]) != kv_format}
            pairs |= _balanced(every, out, policy, policy.balance_ratio, kept_free)
    return pairs


def _of_overstayed(
    instances: Iterable[Candidate], pairs: Mapping[InstanceId, InstanceId]
) -> dict[InstanceId, InstanceId]:
    """The destinations of terminating instances that move requests without their memory, and have
    none in these pairs: the freest ones that are left."""
    every = tuple(instances)
    overstayed = sorted(
        each.instance_id
        for each in every
        if each.load.is_terminating and each.load.move_tokens == 0 and each.instance_id not in pairs
    )
    if not overstayed:
        return {}
    taken = set(pairs.values())
    left = [
        each for each in every if not each.load.is_terminating and each.instance_id not in taken
    ]
    left.sort(key=lambda each: (-each.freeness, each.instance_id))
    return {
        source: destination.instance_id
        for source, destination in zip(overstayed, left, strict=False)
    }


def _place_for(
    source: Candidate,
    destinations: Sequence[Candidate],
    policy: PolicyConfig,
    kept_free: InstanceId | None,
) -> int | None:
    """The place of the source's destination among those that are left, the freest first."""
    is_terminating = source.load.is_terminating
    for place, destination in enumerate(destinations):
        if destination.instance_id == kept_free and not is_terminating:
            continue
        if not policy.pairs_only_to_gain or move_helps(source, destination, policy):
            return place
        could_hold = (source.load.move_tokens or 0) <= destination.load.total_tokens
        if could_hold and not is_terminating:
            return None
    return None


def checked_pairs(
    pairs: Mapping[InstanceId, InstanceId] | Iterable[tuple[InstanceId, InstanceId]],
    instances: Sequence[Candidate],
) -> dict[InstanceId, InstanceId]:
    """The pairs that a custom class has made of these instances.

    Raises:
        ConfigurationError: these are no pairs, or an instance is not among those that were given,
            or its own destination.
    """
    if isinstance(pairs, Iterator):
        # Not in the try: an error in a generator is its author's to see.
        pairs = tuple(pairs)
    try:
        pairs = dict(pairs)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"pair must return a mapping of sources to destinations, not {pairs!r}"
        ) from None
    known = {each.instance_id for each in instances}
    for each in (*pairs.keys(), *pairs.values()):
        if not isinstance(each, str) or each not in known:
            raise ConfigurationError(
                f"pair: {each!r} is not the instance_id of an instance that was given"
            )
    for source, destination in pairs.items():
        if source == destination:
            raise ConfigurationError(f"pair: {source!r} cannot be its own destination")
    return pairs


def _balanced(
    candidates: CandidateTable,
    already_paired: Set[InstanceId],
    policy: PolicyConfig,
    ratio: float,
    kept_free: InstanceId | None,
) -> dict[InstanceId, InstanceId]:
    """Pairs between which the next move evens out the loads of now, or those that are expected at
    the horizon (`balance_horizon_steps`).

    The source has more than the destination will have. To come back, a request would need the same
    the other way round; so requests that stay the same come to rest. Headrooms count as load where
    a request would go, so that they stay free.
    """
    loads_tokens = candidates.column(REAL_LOAD_TOKENS).tolist()
    virtual_loads_tokens = candidates.column(VIRTUAL_LOAD_TOKENS).tolist()
    if policy.balance_horizon_steps is not None:
        loads_tokens = [balanced_load_tokens(each, policy) for each in candidates]
        virtual_loads_tokens = [
            load_tokens + each.headroom_share * each.headrooms_tokens
            for load_tokens, each in zip(loads_tokens, candidates, strict=True)
        ]
    growth_tokens = policy.growth_steps * candidates.column(NUM_REQUESTS)
    room_tokens = (candidates.column(ROOM_TOKENS) - growth_tokens).tolist()
    ids = [each.instance_id for each in candidates]
    staying = np.flatnonzero(candidates.column(IS_TERMINATING) == 0).tolist()
    if already_paired:
        staying = [row for row in staying if ids[row] not in already_paired]
    staying.sort(key=ids.__getitem__)
    # Of equal loads, both sorts leave the smaller id in front.
    sources = sorted(staying, key=loads_tokens.__getitem__, reverse=True)
    destinations = sorted(
        (row for row in staying if room_tokens[row] > 0), key=virtual_loads_tokens.__getitem__
    )
    if kept_free is not None:
        destinations = [row for row in destinations if ids[row] != kept_free]
    pairs: dict[InstanceId, InstanceId] = {}
    paired: set[int] = set()
    place = 0
    for source in sources:
        while place < len(destinations) and destinations[place] in paired:
            place += 1
        if place == len(destinations) or (destination := destinations[place]) == source:
            # The loads of those that are left are below all destinations'.
            break
        if loads_tokens[source] <= ratio * virtual_loads_tokens[destination]:
            # It is near without a move, and those that are left have less.
            break
        load = candidates[source].load
        moved_tokens = load.move_tokens
        if moved_tokens is None or source in paired:
            continue
        after_tokens = virtual_loads_tokens[destination] + added_load_tokens(load, policy)
        is_far = loads_tokens[source] > ratio * after_tokens
        # Where it is not, another source, with less to move, may be far enough all the same.
        if is_far and moved_tokens <= room_tokens[destination]:
            pairs[ids[source]] = ids[destination]
            paired |= {source, destination}
    return pairs


def balanced_load_tokens(candidate: Candidate, policy: PolicyConfig) -> float:
    """The load that moves for balance even out: that of now, or the one that is expected."""
    if policy.balance_horizon_steps is None:
        return candidate.real_load_tokens
    return candidate.coming_load_tokens


def added_load_tokens(load: InstanceLoad, policy: PolicyConfig) -> int:
    """What the next move from the instance, if there is one, adds to that load elsewhere."""
    if policy.balance_horizon_steps is None:
        return load.move_tokens or 0
    return load.move_coming_tokens


def move_helps(source: Candidate, destination: Candidate, policy: PolicyConfig) -> bool:
    """Whether the next move fits the destination, narrows the gap in freeness, and leaves the
    destination freer than the source was.

    Without this, a request that overloads any instance by itself (one that fills the memory, or
    a lone one of high priority above its target load) would go back and forth every round. As
    each move raises the lower freeness of its pair, moves of an unchanging set of requests
    come to an end. The gap to a terminating instance is infinite; every move from it helps.
    """
    moved_tokens = source.load.move_tokens
    if moved_tokens is None:
        return False
    load = destination.load
    room_tokens = load.total_tokens - load.used_tokens - load.prefill_demand_tokens
    room_tokens -= sum(request.demand_tokens for request in destination.in_flight)
    if moved_tokens > room_tokens:
        return False
    if source.load.is_terminating:
        return True
    source_after, destination_after = _after_move(source, destination, moved_tokens, policy)
    gap_after = abs(destination_after.freeness - source_after.freeness)
    narrows = gap_after < destination.freeness - source.freeness
    return narrows and destination_after.freeness > source.freeness


def _after_move(
    source: Candidate, destination: Candidate, moved_tokens: int, policy: PolicyConfig
) -> tuple[Candidate, Candidate]:
    """Both instances as if the source's next request ran on the destination.

    The request is assumed to have the lowest priority that runs on the source. The last one of
    its priority frees the whole headroom there; the first one of it at the destination adds it.
    """
    leaving, arriving = source.load, destination.load
    counts = dict(leaving.num_by_priority)
    priority = min(counts, default=NORMAL)
    freed_tokens = added_tokens = moved_tokens
    if counts.get(priority, 0) <= 1:
        freed_tokens += headroom_tokens(priority, leaving.total_tokens, policy)
    if priority not in dict(arriving.num_by_priority):
        added_tokens += headroom_tokens(priority, arriving.total_tokens, policy)
    left = structs.replace(
        leaving,
        free_tokens=leaving.free_tokens + freed_tokens,
        normal_free_tokens=leaving.normal_free_tokens + moved_tokens,
        num_running=leaving.num_running - 1,
    )
    arrived = structs.replace(
        arriving,
        free_tokens=arriving.free_tokens - added_tokens,
        normal_free_tokens=arriving.normal_free_tokens - moved_tokens,
        num_running=arriving.num_running + 1,
    )
    # The share is the cluster's; an instance without a headroom has none yet.
    share = min(source.headroom_share, destination.headroom_share)
    return source.with_load(left), replace(destination, load=arrived, headroom_share=share)
