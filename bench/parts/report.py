"""Results of `python -m bench.parts`: rows, and the table of the page."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.common import results_io
from bench.parts.trials import MEMORY, REPLACED, SILENCE, TRIALS, UNSERVED, Fault, Trial
from bench.parts.watching import Observation

WITH, WITHOUT = "with", "without"
SIDES = (WITH, WITHOUT)

Row = Mapping[str, Any]


def row_of(trial: Trial, fault: Fault, side: str, seen: Sequence[Observation]) -> dict[str, Any]:
    """A row: a fault of one side, all repeats together."""
    waits_s = [wait_s for each in seen for wait_s in each.first_token_s]
    replaced_s = [each.replaced_s for each in seen if each.replaced_s is not None]
    ended_s = [each.ended_s for each in seen if each.ended_s is not None]
    return {
        "trial": trial.name,
        "part": trial.removal.part,
        "fault": fault.name,
        "side": side,
        "commit": results_io.measured_commit(),
        "n": len(seen),
        "start_s": results_io.summary([each.start_s for each in seen]),
        "streams": sum(each.streams for each in seen),
        "cut": sum(each.cut for each in seen),
        "short": sum(each.short for each in seen),
        "refused": sum(each.refused for each in seen),
        "unserved_s": results_io.summary([each.unserved_s for each in seen]),
        "served_again": sum(each.is_served for each in seen),
        "silence_s": results_io.summary([each.silence_s for each in seen]),
        "first_token_s": results_io.summary(waits_s) if waits_s else None,
        "replaced": len(replaced_s),
        "replaced_s": results_io.summary(replaced_s) if replaced_s else None,
        "migrations": sum(each.migrations for each in seen),
        "frontend_mib": round(max(each.frontend_bytes for each in seen) / (1 << 20)),
        "ended": len(ended_s),
        "ended_s": results_io.summary(ended_s) if ended_s else None,
        "seen": [each.json() for each in seen],
    }


def markdown(document: Mapping[str, Any], starts: Mapping[str, Any]) -> str:
    """The table of `parts.json`.

    Args:
        starts: the document of `instance_start.json`.
    """
    hardware = document["hardware"]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in document["rows"]))
    lines = [
        f"Measured on {document['date'][:10]} at commit {commits}: {hardware['cpu']}, "
        f"{hardware['num_cores']} cores, emulated engines; the fork server on "
        f"{starts['date'][:10]} at commit {starts['commit']}, vLLM with the small model.",
        "",
        "| part | fault | with it | without it |",
        "| --- | --- | --- | --- |",
    ]
    rows = {(row["trial"], row["fault"], row["side"]): row for row in document["rows"]}
    for trial in TRIALS:
        for fault in trial.faults:
            sides = [rows.get((trial.name, fault.name, side)) for side in SIDES]
            if (found := [each for each in sides if each is not None]) and len(found) == 2:
                told = [in_words(each, fault.shows) for each in found]
                name = f"{fault.name}, {found[0]['n']} times" if fault.repeats > 1 else fault.name
                lines.append(f"| {' | '.join((trial.removal.part, name, *told))} |")
    times = {row["way"]: row["ready_s"]["median"] for row in starts["rows"]}
    lines.append(
        f"| fork server | one more instance of vLLM is needed | it serves after "
        f"{times['fork']:.1f} s | it serves after {times['new process']:.1f} s |"
    )
    return "\n".join(lines)


def in_words(row: Row, shows: Sequence[str]) -> str:
    """What clients saw, in words."""
    told = []
    if row["ended"]:
        after = f"{row['ended_s']['median']:.1f} s"
        every = "" if row["ended"] == row["n"] else f" in {row['ended']} of {row['n']}"
        told.append(f"**the server ends after {after}**{every}")
    told.append(f"{row['cut']} of {row['streams']} streams cut")
    if row["refused"]:
        told.append(f"{row['refused']} of {row['short']} new requests failed")
    if UNSERVED in shows or (row["refused"] and not row["ended"]):
        if not row["refused"]:
            told.append("always served")
        elif row["served_again"] == row["n"]:
            told.append(f"served again after {row['unserved_s']['median']:.1f} s")
        else:
            told.append(f"**no service until the end, {row['unserved_s']['median']:.0f} s**")
    if row["ended"]:
        return "; ".join(told)
    if SILENCE in shows:
        told.append(f"longest pause of a stream {row['silence_s']['median']:.1f} s")
    if REPLACED in shows:
        told.append(_replaced(row))
    if MEMORY in shows:
        told.append(f"front end grows by {row['frontend_mib']} MiB")
    return "; ".join(told)


def _replaced(row: Row) -> str:
    if row["replaced"] < row["n"]:
        return f"**instance replaced in {row['replaced']} of {row['n']}**"
    return f"instance replaced after {row['replaced_s']['median']:.1f} s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def seconds_of(last: Observation) -> str:
    """One line of progress."""
    parts = [f"{last.cut} of {last.streams} streams cut", f"{last.refused} of {last.short} failed"]
    parts.append(f"longest pause {last.silence_s:.2f} s")
    if last.unserved_s:
        parts.append(f"unserved {last.unserved_s:.1f} s")
    if last.replaced_s is not None:
        parts.append(f"replaced after {last.replaced_s:.1f} s")
    if last.first_token_s:
        parts.append(f"first token {_ms(median(last.first_token_s))}")
    parts.append(f"{last.migrations} migrations, {last.frontend_bytes >> 20} MiB")
    if last.ended_s is not None:
        parts.append(f"server ended after {last.ended_s:.1f} s")
    return ", ".join(parts)
