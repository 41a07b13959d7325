"""Results of `sterna bench chaos`: rows, summary, table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.chaos.clients import Answer, differences
from bench.chaos.faults import CUT, DEADLY, FAULTS, INSTANCE, KILL, STOP, Fault
from bench.common import results_io
from bench.common.pages import goal_list
from sterna.frontend.requests.request_ids import choice_of, meant
from sterna.types import RequestId

MOVED, BESIDE = "planned move", "beside planned moves"


@dataclass(frozen=True, slots=True)
class Move:
    """A migration that was ordered and committed: its engine request, begin and end."""

    request_id: RequestId
    begin_s: float
    end_s: float


def rows_of(
    faults: Sequence[Fault], moves: Sequence[Move], answers: Sequence[Answer], recovery_s: float
) -> list[dict[str, Any]]:
    """A row for moves, one for the streams beside them, and one for each kind of fault: its count,
    the longest gap of each affected stream, the waits of requests for their first token meanwhile,
    and the time until the server was whole again.

    Each choice of an answer is a stream. A fault of an instance affects the streams on it; another
    fault affects all open streams.
    """
    moved_s, beside_s = _gaps_of_moves(moves, answers)
    rows = [_row(MOVED, len(moves), moved_s), _row(BESIDE, len(moves), beside_s)]
    for kind in sorted({each.kind for each in faults}, key=FAULTS.index):
        those = [each for each in faults if each.kind == kind]
        gaps_s = [gap_s for each in those for gap_s in _gaps_of(each, answers, recovery_s)]
        back_s = [each.back_s for each in those if each.back_s is not None]
        noticed_s = [each.noticed_s for each in those if each.noticed_s is not None]
        waits_s = [wait_s for each in those for wait_s in _waits_of(each, answers, recovery_s)]
        rows.append(_row(kind, len(those), gaps_s, back_s, noticed_s, waits_s))
        rows[-1]["never_whole"] = len(those) - len(back_s)
    return rows


def summary_of(
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer],
    expected: Mapping[int, Mapping[int, Sequence[int]]],
    num_held: int = 0,
) -> dict[str, Any]:
    """The outcome of the requests and of their tokens.

    Args:
        expected: the right tokens by question and choice.
        num_held: the requests to engines that waited at the scheduler.
    """
    found = {"lost": 0, "repeated": 0, "changed": 0}
    for answer in answers:
        right = expected[answer.question.number]
        for index, tokens in right.items():
            came = answer.tokens.get(index, [])
            # The tokens before a failure must be right as well.
            until = len(tokens) if answer.error is None else len(came)
            each = differences(tokens[:until], came)
            found["lost"] += each.lost
            found["repeated"] += each.repeated
            found["changed"] += each.changed
    by_event = {row["event"]: row["gap_s"] for row in rows if row["n"]}
    deadly = [row for row in rows if row["event"] in DEADLY and row["n"]]
    return {
        "requests": len(answers),
        "held": num_held,
        "failed": sum(each.error is not None for each in answers),
        "read_on": sum(each.num_breaks > 0 for each in answers),
        "tokens_lost": found["lost"],
        "tokens_repeated": found["repeated"],
        "tokens_changed": found["changed"],
        "tokens": sum(len(tokens) for each in answers for tokens in each.tokens.values()),
        "faults": sum(row["events"] for row in rows if row["event"] not in (MOVED, BESIDE)),
        "gap_s": {
            "steps": _distribution(_steps(answers)),
            **by_event,
            "instance_died_p99": max((row["gap_s"]["p99"] for row in deadly), default=None),
        },
        "wait_s": _distribution([each.wait_s for each in answers if each.wait_s is not None]),
    }


def broken_promises(
    summary: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], *, is_crowded: bool = False
) -> list[str]:
    """The broken promises, in words.

    Args:
        is_crowded: whether some requests had to wait at the scheduler.
    """
    counted = ("failed", "tokens_lost", "tokens_repeated", "tokens_changed")
    broken = [f"{each.replace('_', ' ')}: {summary[each]}" for each in counted if summary[each]]
    broken += [
        f"never whole again after: {row['event']}" for row in rows if row.get("never_whole", 0)
    ]
    if not summary["requests"]:
        broken.append("no requests")
    if is_crowded and not summary["held"]:
        broken.append("no request waited at the scheduler")
    return broken


def _row(
    event: str,
    count: int,
    gaps_s: Sequence[float],
    back_s: Sequence[float] = (),
    noticed_s: Sequence[float] = (),
    waits_s: Sequence[float] = (),
) -> dict[str, Any]:
    return {
        "event": event,
        "events": count,
        "n": len(gaps_s),
        "gap_s": _distribution(gaps_s),
        "back_s": _distribution(back_s),
        "noticed_s": _distribution(noticed_s),
        "waits": len(waits_s),
        "wait_s": _distribution(waits_s),
    }


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {**results_io.summary(values), "max": round(max(values), 4)}


def _gaps_of(fault: Fault, answers: Iterable[Answer], recovery_s: float) -> list[float]:
    is_of_instance = fault.kind.endswith(f"-{INSTANCE}")
    gaps_s = []
    for answer in answers:
        hit = _choices_of(answer, fault.affected)
        for index, gap_s in _gaps_in(answer, fault.at_s, fault.at_s + recovery_s):
            if index in hit if is_of_instance else _is_open(answer, fault.at_s):
                gaps_s.append(gap_s)
    return gaps_s


def _gaps_of_moves(
    moves: Iterable[Move], answers: Sequence[Answer]
) -> tuple[list[float], list[float]]:
    """The gaps of moved streams, and of the others at the same time."""
    moved_s: list[float] = []
    beside_s: list[float] = []
    for move in moves:
        for answer in answers:
            moved = _choices_of(answer, [move.request_id])
            for index, gap_s in _gaps_in(answer, move.begin_s, move.end_s):
                (moved_s if index in moved else beside_s).append(gap_s)
    return moved_s, beside_s


def _gaps_in(answer: Answer, begin_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    for index in answer.times_s:
        gap_s = answer.gap_s(index, begin_s, end_s)
        if gap_s is not None:
            yield index, gap_s


def _choices_of(answer: Answer, request_ids: Iterable[RequestId]) -> set[int]:
    """The choices of the answer that these engine requests compute."""
    if answer.response_id is None:
        return set()
    return {choice_of(each) for each in meant(answer.response_id, request_ids)}


def _waits_of(fault: Fault, answers: Iterable[Answer], recovery_s: float) -> list[float]:
    """The waits for first tokens, of requests that waited at the fault or were sent soon after."""
    return [
        answer.wait_s
        for answer in answers
        if answer.wait_s is not None
        and answer.sent_s < fault.at_s + recovery_s
        and answer.sent_s + answer.wait_s > fault.at_s
    ]


def _is_open(answer: Answer, at_s: float) -> bool:
    return answer.sent_s <= at_s and (answer.ended_s is None or answer.ended_s > at_s)


def _steps(answers: Iterable[Answer]) -> list[float]:
    """All times from one event of a choice to the next."""
    return [
        after - before
        for answer in answers
        for times_s in answer.times_s.values()
        for before, after in pairwise(times_s)
    ]


# ------------------------------------------------------------------------------------ the page

_NAMES = {
    INSTANCE: "an instance",
    "front-end": "a front end",
    "scheduler": "the global scheduler",
    "supervisor": "the supervisor",
    "driver": "the driver",
    "gcs": "Ray's GCS",
}
_DEEDS = {
    KILL: "{} is killed",
    STOP: "{} is stopped (SIGSTOP)",
    CUT: "the connections of {} are cut",
}


def _title(event: str) -> str:
    if event == MOVED:
        return "a request is moved on purpose"
    if event == BESIDE:
        return "meanwhile, those that are not moved"
    deed, component = event.split("-", 1)
    return _DEEDS[deed].format(_NAMES[component])


def _in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def markdown(document: Mapping[str, Any]) -> str:
    """The table of `chaos.json`."""
    hardware, config, summary = document["hardware"], document["config"], document["summary"]
    steps, first = summary["gap_s"]["steps"], summary["wait_s"]
    held = ""
    if config.get("is_crowded"):
        held = (
            f" {summary['held']} requests to engines (one for each choice, and another one after a "
            "death) waited at the scheduler."
        )
    lines = [
        f"Measured on {document['date'][:10]} at commit {document['commit']}: {hardware['cpu']}, "
        f"{hardware['num_cores']} cores; `sterna serve {' '.join(config['server'])}`, "
        f"{config['minutes']:g} minutes, {config['streams']} streams at once. "
        f"**{summary['requests']} requests, {summary['failed']} failed; of {summary['tokens']:,} "
        f"tokens {summary['tokens_lost']} lost, {summary['tokens_repeated']} repeated, "
        f"{summary['tokens_changed']} changed.**{held} {summary['read_on']} were resumed after "
        f"their connection broke. From one token to the next: median {_in_ms(steps['median'])}, "
        f"P99 {_in_ms(steps['p99'])}; to the first one: median {_in_ms(first['median'])}, "
        f"P99 {_in_ms(first['p99'])}.",
        "",
        "| what happens | how often | streams | longest gap, median, s | P99, s | max, s | "
        "requests meanwhile | first token, max, s | noticed after, max, s | "
        "whole again after, median, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        gap, back, noticed, wait = (
            row[each] for each in ("gap_s", "back_s", "noticed_s", "wait_s")
        )
        gaps = ["–"] * 3 if gap is None else [f"{gap[k]:.2f}" for k in ("median", "p99", "max")]
        whole = "–" if back is None else f"{back['median']:.1f}"
        seen = "–" if noticed is None else f"{noticed['max']:.2f}"
        waits = ("–", "–") if wait is None else (str(row["waits"]), f"{wait['max']:.2f}")
        counts = (str(row["events"]), str(row["n"]))
        lines.append(
            f"| {' | '.join((_title(row['event']), *counts, *gaps, *waits, seen, whole))} |"
        )
    return "\n".join([*lines, "", goal_list(document["goals"])])
