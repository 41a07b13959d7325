"""The results of `sterna bench memory`: tables and a summary. Pure, from rows alone."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from bench.common.tables import Row, markdown_table, number, rounded
from bench.plain_vllm.sides import STERNA, VLLM_LEAN

EMULATED = 16
"""The number of instances where streams are counted; no other row has as many."""

KINDS = (
    ("HTTP server", ("_FrontendActor", "bench.plain_vllm.vllm_command", "VLLM::APIServer")),
    ("engines", ("_InstanceActor", "VLLM::EngineCore", "VLLM::Worker")),
    ("scheduler", ("_SchedulerActor",)),
    ("supervisor", ("_SupervisorActor",)),
    ("fork server", ("sterna.runtime.fork_server",)),
    ("Ray", ("/ray/", "ray::", "sterna.runtime.home.driver")),
    ("the command", ("sterna serve",)),
)
"""Kinds of processes, with words of which their command lines contain one; the first counts."""

OTHERS = "others"


def kind_of(command_line: str) -> str:
    """The kind of a process."""
    for kind, words in KINDS:
        if any(word in command_line for word in words):
            return kind
    return OTHERS


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """In MiB: what Sterna needs beyond vLLM with one replica and for each further one, and a
    stream."""
    one, two = (_beyond(rows, replicas) for replicas in (1, 2))
    return {
        "server_mib": rounded(one),
        "further_instance_mib": None if one is None or two is None else rounded(two - one),
        "stream_kib": {
            str(streams): rounded(1024 * mib) for streams, mib in _of_streams(rows).items()
        },
    }


def markdown(rows: Sequence[Row]) -> str:
    """The tables of the page."""
    num_rounds = len({row["seed"] for row in rows})
    kinds = [*(kind for kind, _ in KINDS), OTHERS]
    lines = []
    for replicas in (1, 2):
        for side in (VLLM_LEAN, STERNA):
            chosen = _of(rows, side, replicas)
            if chosen:
                cells = [number(_mib(chosen, _of_kind(kind))) for kind in kinds]
                lines.append([str(replicas), side, *cells, number(_mib(chosen, _total))])
    parts = [
        f"Memory of an idle server [MiB], medians over {num_rounds} starts; pages that several "
        "processes share count once:",
        markdown_table(("replicas", "server", *kinds, "all"), lines, num_text=2),
    ]
    streams = _of_streams(rows)
    if streams:
        stream_lines = [
            [
                f"{streams:,}",
                number(_most_open(rows, streams)),
                number(1024 * mib),
                number(_failed(rows, streams)),
            ]
            for streams, mib in streams.items()
        ]
        parts += [
            f"Sterna with {EMULATED} emulated instances, and streams of 32 tokens, which are sent "
            "all together; with the most that were open at one time, if that was counted:",
            markdown_table(("streams", "open at once", "each [KiB]", "failed"), stream_lines),
        ]
    return "\n\n".join(parts)


def _of(rows: Sequence[Row], side: str, replicas: int) -> list[Row]:
    return [row for row in rows if (row["side"], row["replicas"]) == (side, replicas)]


def _of_kind(kind: str) -> Callable[[Row], float]:
    return lambda row: float(row["memory_bytes"].get(kind, 0))


def _total(row: Row) -> float:
    return float(sum(row["memory_bytes"].values()))


def _mib(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return median(value(row) for row in rows) / 2**20


def _beyond(rows: Sequence[Row], replicas: int) -> float | None:
    theirs, ours = (_of(rows, side, replicas) for side in (VLLM_LEAN, STERNA))
    return _mib(ours, _total) - _mib(theirs, _total) if theirs and ours else None


def _of_streams(rows: Sequence[Row]) -> dict[int, float]:
    """What each stream takes, in MiB, by their number."""
    of_streams = _of(rows, STERNA, EMULATED)

    def each_bytes(row: Row) -> float:
        return (_total(row) - float(sum(row["before_bytes"].values()))) / float(row["streams"])

    return {
        streams: _mib([row for row in of_streams if row["streams"] == streams], each_bytes)
        for streams in sorted({row["streams"] for row in of_streams})
    }


def _most_open(rows: Sequence[Row], streams: int) -> float | None:
    """The median over the rounds; None where older rows do not have it."""
    found = [row["most_open"] for row in rows if row["streams"] == streams and "most_open" in row]
    return median(found) if found else None


def _failed(rows: Sequence[Row], streams: int) -> int:
    return sum(row["failed"] for row in rows if row["streams"] == streams and "failed" in row)
