"""Auto-scaling: adds and terminates instances (Section 4.4.3, auto-scaling). Pure.

The average freeness for the normal priority is kept within [x, y]. Each side has a deadline,
set when the average leaves the range on that side and cleared when it comes back. The decision
is made at the deadline, and the next one needs another whole period.

Departure from the paper: if no instance has memory or a place in its batch for a request, more
instances are started at once, whatever the average is. Models without a KV cache are not scaled.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sterna.config import ScalingConfig
from sterna.errors import ConfigurationError
from sterna.policy.virtual_usage import Candidate, normal_freeness_of
from sterna.types import InstanceId


@dataclass(frozen=True, slots=True)
class ScaleUp:
    """Start this number of further instances."""

    num_instances: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Empty this instance, then end it."""

    instance_id: InstanceId


ScalingDecision = ScaleUp | Terminate


@dataclass(frozen=True, slots=True)
class ScalingState:
    """The deadlines of the next decisions.

    Attributes:
        scale_up_at_s: deadline of an average below x; None while it is not below.
        scale_down_at_s: deadline of an average above y; None while it is not above.
        no_end_before_s: no instance is terminated before this time (`cooldown_s`).
        no_start_before_s: waiting requests have no further instance added before this time, unless
            those that were asked for begin to start: the supervisor may be slow.
        num_known: instances when these were asked for, those that started included; without those
            that were being emptied where a custom class decides (`towards`).
        has_asked_for_more: whether those of `towards` were more than there were, or fewer.
        next_look_at_s: time of the next decision if the average need not last for a period
            (`is_sustained`); None before the first one.
    """

    scale_up_at_s: float | None = None
    scale_down_at_s: float | None = None
    no_end_before_s: float = -math.inf
    no_start_before_s: float = -math.inf
    num_known: int = 0
    has_asked_for_more: bool = True
    next_look_at_s: float | None = None


def average_normal_freeness(candidates: Iterable[Candidate]) -> float | None:
    """Average over the instances that stay, in decode steps; None if there is none, or no memory
    (a model without a KV cache).

    A terminating instance is left out: with its minus infinity the average would be that, too, and
    the average is to describe the remaining capacity.
    """
    staying = _staying(candidates)
    if not any(each.load.total_tokens for each in staying):
        return None
    values = [normal_freeness_of(each.load, each.in_flight, each.policy) for each in staying]
    return math.fsum(values) / len(values)


def checked_number(wanted: object) -> int | None:
    """The number of instances that a custom class wants; None for the rules of its base.

    Raises:
        ConfigurationError: it is no integer.
    """
    if wanted is None:
        return None
    try:
        return operator.index(wanted)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(
            f"num_instances: a number of instances must be an integer, not {wanted!r}"
        ) from None


def towards(
    state: ScalingState,
    num_wanted: int,
    candidates: Iterable[Candidate],
    config: ScalingConfig,
    *,
    num_starting: int,
    num_pending: int = 0,
    now_s: float,
) -> tuple[ScalingState, ScalingDecision | None]:
    """The next state, and the decision that brings the cluster nearer to this number of instances,
    within the bounds, or None.

    A decision is not repeated until it shows, or a period has passed: the supervisor may be slow.
    None are terminated while others come up, except for `num_pending` starts that wait for a place,
    perhaps for ever: the decision then gives up one of these, whichever instance it names.
    """
    every = tuple(candidates)
    staying = _staying(every)
    num_there = len(staying) + num_starting
    # A death is no answer.
    shows = num_there > state.num_known if state.has_asked_for_more else num_there < state.num_known
    if now_s < state.no_start_before_s and not shows:
        return state, None
    decision: ScalingDecision | None = None
    num_wanted = min(max(num_wanted, config.min_instances), config.max_instances)
    if num_wanted > num_there:
        # Those that are being emptied hold their GPUs.
        num_more = min(num_wanted - num_there, config.max_instances - len(every) - num_starting)
        decision = ScaleUp(num_more) if num_more > 0 else None
    elif num_wanted < num_there and staying and num_starting == num_pending:
        decision = Terminate(_to_terminate(staying, config))
    if decision is None:
        # The deadlines of `decide` are of another time, should it decide again.
        return ScalingState(), None
    after = ScalingState(
        no_start_before_s=now_s + config.period_s,
        num_known=num_there,
        has_asked_for_more=isinstance(decision, ScaleUp),
    )
    return after, decision


def decide(
    state: ScalingState,
    candidates: Iterable[Candidate],
    config: ScalingConfig,
    *,
    num_starting: int,
    num_pending: int = 0,
    now_s: float,
    begins_s: float = 0.0,
    held_since_s: float | None = None,
) -> tuple[ScalingState, ScalingDecision | None]:
    """The next state, and a decision or None.

    Starting instances (`num_starting`) will be idle, and lower the number that is still needed.
    They count against the maximum, and so do terminating ones, which hold their GPUs until they
    are empty. A side on which the limits leave nothing to do keeps its deadline, so that it acts as
    soon as they allow it. The same holds before `begins_s`, when nothing is decided yet.

    Of the starting ones, `num_pending` wait for a place, perhaps for ever. A decision to terminate
    then gives up one of these starts, whichever instance it names.

    Args:
        held_since_s: when the first of those that wait at the scheduler came; None without any.
    """
    every = tuple(candidates)
    staying = _staying(every)
    num_room = config.max_instances - len(every) - num_starting
    average = average_normal_freeness(staying)
    if average is None:
        # Nothing is known; the supervisor replaces dead instances. Without a KV cache there is no
        # freeness to go by.
        return ScalingState(), None
    # No decision before `begins_s`.
    if now_s < begins_s:
        num_room = 0
    can_shrink = now_s >= begins_s and len(staying) + num_pending > config.min_instances
    if not config.is_sustained:
        return _look(state, average, staying, config, num_starting, num_room, can_shrink, now_s)
    cooled_s = state.no_end_before_s
    if num_starting > num_pending:
        # An instance that comes up is empty, and lifts the average before it gets requests.
        cooled_s = now_s + config.cooldown_s
    num_known = len(every) + num_starting
    # They may be up before the next round.
    has_begun = num_starting > 0 or num_known > state.num_known
    no_start_before_s = -math.inf if has_begun else state.no_start_before_s
    going_on = ScalingState(
        no_end_before_s=cooled_s, no_start_before_s=no_start_before_s, num_known=state.num_known
    )
    cools_s, asks_s = now_s + config.cooldown_s, now_s + config.period_s
    is_held = held_since_s is not None and now_s >= held_since_s + config.starved_after_s
    is_short = is_held or all(map(_is_full, staying))
    is_starved = is_short and num_starting == 0 and now_s >= no_start_before_s
    if average < config.low_freeness_steps or is_starved:
        deadline_s = now_s if is_starved else _deadline(state.scale_up_at_s, config, now_s)
        num_needed = _num_needed(staying, config, num_starting)
        num_more = min(max(1, num_needed) if is_starved else num_needed, num_room)
        if now_s >= deadline_s and num_more > 0:
            return ScalingState(
                no_end_before_s=cools_s, no_start_before_s=asks_s, num_known=num_known
            ), ScaleUp(num_more)
        return replace(going_on, scale_up_at_s=deadline_s), None
    if average > config.high_freeness_steps:
        deadline_s = _deadline(state.scale_down_at_s, config, now_s)
        # A request that needs a whole instance may wait beside much freeness.
        if now_s >= max(deadline_s, cooled_s) and can_shrink and not is_short:
            after = replace(going_on, no_end_before_s=cools_s)
            return after, Terminate(_to_terminate(staying, config))
        return replace(going_on, scale_down_at_s=deadline_s), None
    return going_on, None


def _is_full(candidate: Candidate) -> bool:
    """Whether requests queue here because memory or a place in the batch is lacking."""
    load = candidate.load
    has_no_slot = load.num_slots is not None and load.num_running >= load.num_slots
    lacks_memory = load.used_tokens + load.head_demand_tokens > load.total_tokens
    return load.num_queuing > 0 and (has_no_slot or lacks_memory)


def _look(
    state: ScalingState,
    average: float,
    staying: Sequence[Candidate],
    config: ScalingConfig,
    num_starting: int,
    num_room: int,
    can_shrink: bool,
    now_s: float,
) -> tuple[ScalingState, ScalingDecision | None]:
    """Decide by the average of this moment, once a period."""
    look_at_s = _deadline(state.next_look_at_s, config, now_s)
    if now_s < look_at_s:
        return ScalingState(next_look_at_s=look_at_s), None
    # Missed periods are skipped: each would decide by the same loads.
    next_s = look_at_s + config.period_s
    following = ScalingState(next_look_at_s=next_s if next_s > now_s else now_s + config.period_s)
    if average < config.low_freeness_steps:
        num_more = min(_num_needed(staying, config, num_starting), num_room)
        return following, ScaleUp(num_more) if num_more > 0 else None
    if average > config.high_freeness_steps and can_shrink:
        return following, Terminate(_to_terminate(staying, config))
    return following, None


def _staying(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(each for each in candidates if not each.load.is_terminating)


def _deadline(deadline_s: float | None, config: ScalingConfig, now_s: float) -> float:
    return now_s + config.period_s if deadline_s is None else deadline_s


def _num_needed(staying: Sequence[Candidate], config: ScalingConfig, num_starting: int) -> int:
    """The number of idle instances, beyond those that start, that bring the average back to x;
    negative where fewer would do.

    An idle instance has a freeness of M, here the average M of the others.
    """
    num_known = len(staying)
    idle_steps = math.fsum(each.load.total_tokens for each in staying) / num_known
    gain_steps = idle_steps - config.low_freeness_steps
    num_needed = 1
    # If not even an idle instance reaches x, no number restores the average: start one at a time.
    if gain_steps > 0:
        steps = (normal_freeness_of(each.load, each.in_flight, each.policy) for each in staying)
        lacking_steps = num_known * config.low_freeness_steps - math.fsum(steps)
        num_needed = math.ceil(lacking_steps / gain_steps)
    return num_needed - num_starting


def _to_terminate(staying: Sequence[Candidate], config: ScalingConfig) -> InstanceId:
    if config.terminates_newest:
        return max(each.instance_id for each in staying)
    return _emptiest(staying).instance_id


def _emptiest(staying: Sequence[Candidate]) -> Candidate:
    return min(
        staying,
        key=lambda each: (
            each.load.num_running,
            each.load.num_queuing,
            each.load.used_tokens,
            each.instance_id,
        ),
    )
