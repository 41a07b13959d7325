"""Goals of live migration, judged by the benchmark's rows. Pure.

"The downtime of migration is nearly constant with increasing sequence lengths (roughly 20-30 ms),
even shorter than a single decode step. In comparison, the downtimes of baselines increase with
the sequence lengths, reaching up to 111x that of migration. [...] for all sequence lengths, the
migration only takes two stages, which is the minimum" (Section 6.2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.common.pages import Goal
from bench.common.results_io import summary
from bench.migration.samples import PHASES

Row = Mapping[str, Any]

MAX_SPREAD = 1.5
NOT_OF_THE_MIGRATION = {"idle": "first step", "busy": "adoption"}
"""The phase that the engine decides: its first step after a pause, which is longer without a
migration as well, or the wait for the step that is under way at the destination."""

MAX_SHARE_OF_STEP = {"idle": 0.5, "busy": 1.0}
MIN_TIMES_BELOW_RECOMPUTE = 1000.0
MIN_TIMES_BELOW_STOP_AND_COPY = 8.0
NUM_STAGES = 2
COPY_TOKENS, MAX_STRETCH = 8192, 1.1
"""The longest copy at the default pacing, and how much longer the steps of a busy source's other
requests may take meanwhile."""

MIN_THROUGHPUT_RATIO = 0.99


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns the goals that can be judged by the rows."""
    live = [row for row in rows if row["mode"] == "live"]
    found = [*_stages(live)]
    for batch in ("idle", "busy"):
        those = [row for row in live if row["busy"] == (batch == "busy")]
        found += [*_spread(those, batch), *_share_of_step(those, batch), *_longest(those, batch)]
    idle = [row for row in rows if not row["busy"]]
    return [*found, *_stretch(live), *_times_below(idle)]


def cost_goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns the goals that can be judged by the rows of `migration_cost`."""
    ratios = [row for row in rows if row["measure"] == "throughput_ratio"]
    return [
        Goal(
            "throughput with pairing rounds in which nothing moves, to that without rounds",
            f"at least {MIN_THROUGHPUT_RATIO:g}",
            f"{row['enabled_to_disabled']['median']:.3f}",
            row["enabled_to_disabled"]["median"] >= MIN_THROUGHPUT_RATIO,
        )
        for row in ratios
    ]


def _spread(live: Sequence[Row], batch: str) -> Iterator[Goal]:
    """Two goals for each transport: of whole pauses, and of what is the migration's own work."""
    engines_part = NOT_OF_THE_MIGRATION[batch]
    for transport in transports(live):
        rows = [row for row in live if row["transport"] == transport]
        where = f"({transport}, {batch})"
        yield from _flat(f"flat in length {where}", [_downtime_ms(row) for row in rows])
        if all("phases_ms" in row for row in rows):
            without_ms = [median(downtimes_ms(row, leave_out=engines_part)) for row in rows]
            yield from _flat(f"flat in length, without the {engines_part} {where}", without_ms)


def _flat(name: str, medians_ms: Sequence[float]) -> Iterator[Goal]:
    if len(medians_ms) < 2:
        return
    smallest, largest = min(medians_ms), max(medians_ms)
    yield Goal(
        name,
        f"largest at most {MAX_SPREAD:g} times the smallest",
        f"{smallest:.1f} to {largest:.1f} ms",
        0 < largest <= MAX_SPREAD * smallest,
    )


def _share_of_step(live: Sequence[Row], batch: str) -> Iterator[Goal]:
    if not live:
        return
    worst = max(live, key=_step_share)
    bound = MAX_SHARE_OF_STEP[batch]
    yield Goal(
        f"share of a decode step ({batch})",
        f"below {bound:g}",
        f"at most {_step_share(worst):.2f} ({worst['transport']}, {worst['tokens']} tokens)",
        _step_share(worst) < bound,
    )


def _longest(live: Sequence[Row], batch: str) -> Iterator[Goal]:
    """One goal for each transport: even the longest pauses are shorter than a step."""
    for transport in transports(live):
        rows = [row for row in live if row["transport"] == transport and "phases_ms" in row]
        if not rows:
            continue
        longest_ms = summary([each for row in rows for each in downtimes_ms(row)])["p99"]
        step_ms = median(row["decode_step_ms"]["median"] for row in rows)
        yield Goal(
            f"P99 of all lengths ({transport}, {batch})",
            "below a decode step",
            f"{longest_ms:.1f} ms, a step {step_ms:.1f} ms",
            longest_ms < step_ms,
        )


def _stretch(live: Sequence[Row]) -> Iterator[Goal]:
    """One goal for each transport: a copy hardly slows the requests that stay."""
    for row in live:
        migrating_ms = row.get("decode_step_migrating_ms")
        if not row["busy"] or row["tokens"] != COPY_TOKENS or migrating_ms is None:
            continue
        stretch = migrating_ms["median"] / row["decode_step_ms"]["median"]
        yield Goal(
            f"step during a copy of {COPY_TOKENS} tokens, to one without ({row['transport']})",
            f"at most {MAX_STRETCH:g} times as long",
            f"{stretch:.3f} times",
            stretch <= MAX_STRETCH,
        )


def downtimes_ms(row: Row, leave_out: str | None = None) -> list[float]:
    """Returns the downtime of each migration of the row, the sum of its phases, or of all but
    one."""
    phases_ms = [row["phases_ms"][name] for name in PHASES if name != leave_out]
    return [sum(each) for each in zip(*phases_ms, strict=True)]


def _stages(live: Sequence[Row]) -> Iterator[Goal]:
    if live:
        numbers = sorted({row["stages"] for row in live})
        yield Goal(
            "stages of a live migration",
            f"{NUM_STAGES} for every length",
            ", ".join(str(number) for number in numbers),
            numbers == [NUM_STAGES],
        )


def _times_below(idle: Sequence[Row]) -> Iterator[Goal]:
    """Compares at the greatest length, on idle instances."""
    longest = max((row["tokens"] for row in idle), default=0)
    at_longest = [row for row in idle if row["tokens"] == longest]
    live = {row["transport"]: row for row in at_longest if row["mode"] == "live"}
    recompute = [row for row in at_longest if row["mode"] == "recompute"]
    copied = {row["transport"]: row for row in at_longest if row["mode"] == "stop_copy"}
    if live and recompute:
        ratios = {kind: _ratio(recompute[0], live[kind]) for kind in live}
        yield _times_goal("recompute", longest, ratios, min, MIN_TIMES_BELOW_RECOMPUTE)
    # Shared memory carries a whole cache so fast that live migration gains less.
    kinds = [kind for kind in ("gloo", "tcp") if kind in live and kind in copied]
    if kinds:
        ratios = {kind: _ratio(copied[kind], live[kind]) for kind in kinds}
        yield _times_goal("stop and copy", longest, ratios, max, MIN_TIMES_BELOW_STOP_AND_COPY)


def _times_goal(
    other: str,
    tokens: int,
    ratios: Mapping[str, float],
    decide: Callable[[Iterable[float]], float],
    bound: float,
) -> Goal:
    return Goal(
        f"times below {other} at {tokens} tokens",
        f"at least {bound:,g}",
        ", ".join(f"{ratio:,.0f} ({kind})" for kind, ratio in ratios.items()),
        decide(ratios.values()) >= bound,
    )


def _ratio(row: Row, live: Row) -> float:
    return _downtime_ms(row) / _downtime_ms(live)


def _downtime_ms(row: Row) -> float:
    return float(row["downtime_ms"]["median"])


def _step_share(row: Row) -> float:
    return _downtime_ms(row) / float(row["decode_step_ms"]["median"])


def transports(rows: Sequence[Row]) -> list[str]:
    """Returns the transports of the rows, in their order."""
    return list(dict.fromkeys(row["transport"] for row in rows))
