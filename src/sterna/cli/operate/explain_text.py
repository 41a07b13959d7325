"""The text of `sterna explain`: a request's history in sentences. Pure.

What the server answers is documented in docs/operations/explain.md. Events of a newer server that
this module does not know are shown with their fields.
"""

from collections.abc import Iterator
from typing import Any

Described = dict[str, Any]

_HELD = {
    "memory": "no instance has more than {room_tokens} tokens of memory for a request",
    "kept free": "the memory that there is, is kept free for a request before it",
    "prefix": "it waits for an instance that has its prefix",
    "copy": "its prefix is being copied to its instance",
}

_CAUSES = {
    "memory": "{source} is short of memory: freeness {from_value} steps, below {limit}; "
    "{destination} has {to_value}",
    "headroom": "{source} keeps memory free beside requests of high priority: freeness "
    "{from_value} steps with it, below {limit}; {destination} has {to_value}",
    "preemption": "the engine of {source} has preempted requests; freeness {from_value} steps, "
    "{destination} has {to_value}",
    "emptying": "{source} is being emptied; {destination} has a freeness of {to_value} steps",
    "balance": "{source} has {from_value} tokens of load, more than {limit} times the {to_value} "
    "that {destination} will have",
    "policy": "the policy has paired {source} with {destination}",
}


def explained(history: Described) -> str:
    """The history as lines of text, without a final newline."""
    lines = [_headline(history)]
    for event in history["events"]:
        first, *more = _sentences(event, history)
        lines.append(f"{event['at_s']:10.3f} s  {first}")
        lines += [f"{'':14}{each}" for each in more]
    if history["events_dropped"]:
        lines.append(f"{'':14}({history['events_dropped']} further events were not kept)")
    return "\n".join(lines)


def way(moved: Described, suspended_s: float) -> str:
    """Return from where to where a request moved, and how."""
    stages = "stage" if moved["stages"] == 1 else "stages"
    return (
        f"from {moved['from']} to {moved['to']} in {moved['stages']} {stages}, paused for "
        f"{1e3 * suspended_s:.1f} ms"
    )


def _headline(history: Described) -> str:
    state, instance = history["state"], history["instance"]
    where = "" if instance is None else f" on {instance}"
    tokens = history["output_tokens"]
    produced = "" if tokens is None else f", {tokens:,} tokens"
    return f"{history['id']} (class {history['class']}): {state}{where}{produced}"


def _sentences(event: Described, history: Described) -> Iterator[str]:
    """What happened, and in further lines why."""
    match event["event"]:
        case "arrived":
            yield (
                f"arrived at front end {history['frontend']}: {history['prompt_tokens']:,} prompt "
                f"tokens, {history['demand_tokens']:,} tokens of memory to begin"
            )
        case "held":
            yield f"held at the scheduler: {_held_because(event)}"
        case "dispatched":
            yield from _dispatched(event, history)
        case "scheduled":
            yield f"scheduled on {event['instance']} after {event['waited_s']:.3f} s in its queue"
        case "first token":
            cached = event.get("cached_tokens")
            yield "first token" + (f"; {cached:,} prompt tokens were cached" if cached else "")
        case "goes on":
            yield "the first token behind those"
        case "preempted":
            yield f"preempted on {event['instance']}, which had no memory left"
        case "resumed":
            yield f"resumed on {event['instance']} after {event['waited_s']:.3f} s"
        case "moved":
            yield f"moved {way(event, event['suspended_s'])}"
            yield _moved_because(event)
        case "did not move":
            outcome = event["outcome"].replace("_", " ")
            yield f"did not move from {event['from']} to {event['to']}: {outcome}"
            yield _moved_because(event)
        case "lost":
            num_tokens = event["output_tokens"]
            yield f"sent again, behind the {num_tokens:,} tokens that its client has"
        case "failed":
            yield f"failed: {event['reason']}"
        case "aborted":
            yield "aborted: its client has gone, or has all that it asked for"
        case "finished":
            yield "finished"
        case other:
            facts = {name: value for name, value in event.items() if name not in ("at_s", "event")}
            yield f"{other} {facts}"


def _held_because(event: Described) -> str:
    room_tokens = event["room_tokens"]
    if event["cause"] == "memory" and room_tokens is not None and room_tokens <= 0:
        return "no instance has memory for a request, or a place in its batch"
    return _HELD[event["cause"]].format(room_tokens=_number(room_tokens))


def _dispatched(event: Described, history: Described) -> Iterator[str]:
    why = event["why"]
    if why is None:
        yield (
            f"dispatched to {event['instance']} without the scheduler: it has the fewest requests "
            "of this front end"
        )
        return
    num, num_all = why["num_eligible"], why["num_instances"]
    which = f"{num}" if num == num_all else f"{num} eligible of {num_all}"
    held = f" after {why['held_s']:.3f} s at the scheduler" if why["held_s"] >= 1e-3 else ""
    yield (
        f"dispatched to {event['instance']}{held} by the rule {why['rule']}, of {which} "
        f"{'instance' if num_all == 1 else 'instances'}"
    )
    if why["prefix_from"] is not None:
        yield f"a part of its prompt's KV cache was copied from {why['prefix_from']} before"
    yield "chosen     " + _seen(why["chosen"], history)
    if why["next_best"] is not None:
        yield "next best  " + _seen(why["next_best"], history)


def _seen(seen: Described, history: Described) -> str:
    cost = "" if seen["cost"] is None else f"cost {_number(seen['cost'])}, "
    return (
        f"{seen['instance']}: {cost}{seen['num_running']} running, {seen['num_waiting']} waiting, "
        f"memory for {_number(seen['room_tokens'])} tokens, freeness "
        f"{_number(seen['freeness_steps'])} steps, {seen['uncomputed_tokens']:,} tokens to compute "
        f"before, {seen['cached_tokens']:,} of {history['prompt_tokens']:,} prompt tokens cached"
    )


def _moved_because(event: Described) -> str:
    why = event["why"]
    if why is None:
        return "because an operator ordered it"
    unknown = "{source} was paired with {destination} (" + why["cause"] + ")"
    text = _CAUSES.get(why["cause"], unknown)
    because = text.format(
        source=event["from"],
        destination=event["to"],
        from_value=_number(why["source"]),
        to_value=_number(why["destination"]),
        limit=f"{why['limit']:g}",
    )
    return f"because {because}; the first to move: {why['victim'].replace('_', ' ')}"


def _number(value: float | None) -> str:
    """With thousands separated; None is an infinity."""
    if value is None:
        return "unlimited"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"
