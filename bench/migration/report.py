"""The migration benchmark's tables for its page and its plot, both from the result files alone."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.pages import Goal
from bench.common.results_io import summary
from bench.common.tables import markdown_table, span
from bench.migration.goals import cost_goals, downtimes_ms, goals, transports
from bench.migration.samples import PHASES

Row = Mapping[str, Any]

MAX_FOREIGN_CORES = 0.1
"""Load of other programs above which results are unreliable."""

MODE_NAMES = {"live": "live", "stop_copy": "stop and copy", "recompute": "recompute"}
TRANSPORT_NAMES = {"gloo": "Gloo", "tcp": "TCP", "shm": "shm"}


def markdown(document: Mapping[str, Any], cost: Mapping[str, Any] | None = None) -> str:
    """Returns the tables and the goals of the result files.

    Args:
        document: `migration.json`.
        cost: `migration_cost.json`, if there is one.
    """
    rows: Sequence[Row] = document["rows"]
    parts = [_headline(document)]
    for busy in (False, True):
        those = [row for row in rows if row["busy"] == busy]
        if those:
            parts += [_caption(those, busy), _table(those)]
    live = [row for row in rows if row["mode"] == "live" and "phases_ms" in row]
    if live:
        parts += [_PHASES_CAPTION, _phases_table(live), _HISTOGRAMS]
    found = goals(rows)
    if cost is not None:
        parts += [_COPY_CAPTION, _copy_table(cost["rows"])]
        found += cost_goals(cost["rows"])
    parts += [_goal_list(found), "![Downtimes by length](../bench/results/migration.svg)"]
    return "\n\n".join(parts)


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draws the paper's Figure 10: downtimes by length, and decode steps with and without a
    migration."""
    pyplot = _pyplot()
    rows: Sequence[Row] = document["rows"]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2))
    for axis, busy in zip(axes, (False, True), strict=False):
        _draw_downtimes(axis, [row for row in rows if row["busy"] == busy])
        axis.set_title(f"downtime, {'busy' if busy else 'idle'} instances")
    _draw_steps(axes[2], [row for row in rows if row["mode"] == "live" and row["busy"]])
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plot_phases(document: Mapping[str, Any], path: Path) -> None:
    """Draws a histogram of each phase of the pauses of live migrations, by load and transport."""
    pyplot = _pyplot()
    live = [row for row in document["rows"] if row["mode"] == "live"]
    figure, axes = pyplot.subplots(2, len(PHASES), figsize=(13, 5), sharey="row", squeeze=False)
    for busy, line in zip((False, True), axes, strict=True):
        those = [row for row in live if row["busy"] == busy]
        for phase, axis in zip(PHASES, line, strict=True):
            found = {t: _pooled(those, t, phase) for t in transports(those)}
            if found:
                axis.hist(
                    list(found.values()),
                    bins=24,
                    histtype="step",
                    label=[TRANSPORT_NAMES[t] for t in found],
                )
            axis.set_yscale("log")
            axis.set_title(f"{phase}, {'busy' if busy else 'idle'}", fontsize="small")
        line[0].set_ylabel("migrations")
        if those:
            line[0].legend(fontsize="x-small")
    for axis in axes[-1]:
        axis.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # Makes the files of equal numbers equal.
    matplotlib.rcParams["svg.hashsalt"] = "sterna"
    from matplotlib import pyplot

    return pyplot


def _headline(document: Mapping[str, Any]) -> str:
    hardware, rows, config = document["hardware"], document["rows"], document["config"]
    model = config["model"] + (" in float32" if config.get("dtype") == "float32" else "")
    recompute = [row["n"] for row in rows if row["mode"] == "recompute"]
    live = [row["n"] for row in rows if row["mode"] == "live"]
    copied = [row["n"] for row in rows if row["mode"] == "stop_copy"]
    return (
        f"Measured on {document['date'][:10]} at commit {document['commit']}: "
        f"{hardware['cpu']}, {hardware['num_cores']} cores, {model}, "
        f"two instances on one host. Medians of {span(live)} live migrations, {span(copied)} by "
        f"stop and copy, {span(recompute)} by recompute.{noise(rows)}"
    )


def noise(rows: Sequence[Row]) -> str:
    """A note for readers when the machine was not quiet."""
    foreign_cores = max((row["foreign_cores"] for row in rows), default=0.0)
    if foreign_cores <= MAX_FOREIGN_CORES:
        return ""
    return f" Not a quiet machine: other programs kept up to {foreign_cores:.1f} cores busy."


def _caption(rows: Sequence[Row], busy: bool) -> str:
    steps = [row["decode_step_ms"]["median"] for row in rows if row["mode"] == "live"]
    batch = (
        "both instances also run a batch of 8k tokens"
        if busy
        else "each instance runs nothing else"
    )
    if not steps:
        return f"Downtime in ms, {batch}:"
    return f"Downtime in ms, {batch} (a decode step takes {min(steps):.0f} to {max(steps):.0f} ms):"


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys((row["mode"], row["transport"]) for row in rows))
    lengths = sorted({row["tokens"] for row in rows})
    table = [["tokens", *(_column_name(*column) for column in columns)]]
    table.append(["---:"] * len(table[0]))
    for tokens in lengths:
        cells = {(row["mode"], row["transport"]): row for row in rows if row["tokens"] == tokens}
        table.append([f"{tokens:,}", *(_cell(cells.get(column)) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


_PHASES_CAPTION = (
    "Where the downtimes of live migrations go, in ms: median, and P99 of the migrations of all "
    "lengths. *Drain*: from the source's last token until the request has left the batch; *copy*: "
    "until the last stage and the order to adopt it are at the destination; *adoption*: until the "
    "request is in its batch; *first step*: until its first token, less a usual step; *delivery*: "
    "by how much longer this token took to the front end than the one before."
)

_HISTOGRAMS = "![Histograms of the phases](../bench/results/migration_phases.svg)"


def _phases_table(live: Sequence[Row]) -> str:
    lines = []
    for busy in (False, True):
        rows = [row for row in live if row["busy"] == busy]
        for transport in transports(rows):
            of = [row for row in rows if row["transport"] == transport]
            every = [each for row in of for each in downtimes_ms(row)]
            phases = [_pooled(of, transport, phase) for phase in PHASES]
            lines.append(
                [
                    f"{TRANSPORT_NAMES[transport]}, {'busy' if busy else 'idle'}",
                    *(_median_and_p99(values) for values in [*phases, every]),
                ]
            )
    return markdown_table(["", *PHASES, "downtime"], lines)


def _median_and_p99(values_ms: Sequence[float]) -> str:
    found = summary(values_ms)
    return f"{found['median']:.1f}, {found['p99']:.1f}"


def _pooled(rows: Sequence[Row], transport: str, phase: str) -> list[float]:
    return [
        value for row in rows if row["transport"] == transport for value in row["phases_ms"][phase]
    ]


_COPY_CAPTION = (
    "Decode steps in ms of a busy source's other requests, without a migration and while a cache "
    "of 8k tokens is copied away, by how the copy is cut:"
)


def _copy_table(rows: Sequence[Row]) -> str:
    lines = ["| copy | without | median | longest | the copy takes |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    lines += [
        f"| {row['copying']} | {row['decode_step_ms']['median']:.0f} "
        f"| {row['decode_step_migrating_ms']['median']:.0f} "
        f"| {row['longest_step_ms']['median']:.0f} | {row['migration_ms']['median']:.0f} |"
        for row in rows
        if row["measure"] == "copy"
    ]
    return "\n".join(lines)


def _column_name(mode: str, transport: str | None) -> str:
    name = MODE_NAMES[mode]
    return name if transport is None else f"{name}, {TRANSPORT_NAMES[transport]}"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    downtime_ms = row["downtime_ms"]["median"]
    return f"{downtime_ms:.1f}" if downtime_ms < 100 else f"{downtime_ms:,.0f}"


def _goal_list(found: Iterable[Goal]) -> str:
    return "\n".join(
        f"- {goal.name}: {goal.found} (goal: {goal.bound}"
        f"{'' if goal.is_reached else '; **not reached**'})"
        for goal in found
    )


def _draw_downtimes(axis: Any, rows: Sequence[Row]) -> None:
    lines = dict.fromkeys((row["mode"], row["transport"]) for row in rows)
    for mode, transport in lines:
        points = [r for r in rows if (r["mode"], r["transport"]) == (mode, transport)]
        axis.plot(
            [row["tokens"] for row in points],
            [row["downtime_ms"]["median"] for row in points],
            marker="o",
            linestyle={"live": "-", "stop_copy": "--", "recompute": ":"}[mode],
            label=_column_name(mode, transport),
        )
    live = [row for row in rows if row["mode"] == "live"]
    if live:
        lengths = sorted({row["tokens"] for row in live})
        steps = [
            min(r["decode_step_ms"]["median"] for r in live if r["tokens"] == tokens)
            for tokens in lengths
        ]
        axis.plot(lengths, steps, color="grey", linewidth=1, label="a decode step")
    axis.set_yscale("log")
    _label_lengths(axis, rows)
    axis.set_ylabel("ms")


def _draw_steps(axis: Any, rows: Sequence[Row]) -> None:
    for transport in dict.fromkeys(row["transport"] for row in rows):
        points = [row for row in rows if row["transport"] == transport]
        lengths = [row["tokens"] for row in points]
        name = TRANSPORT_NAMES[transport]
        (line,) = axis.plot(
            lengths,
            [row["decode_step_ms"]["median"] for row in points],
            linestyle="--",
            label=f"without, {name}",
        )
        axis.plot(
            lengths,
            [row["decode_step_migrating_ms"]["median"] for row in points],
            marker="o",
            color=line.get_color(),
            label=f"with a migration, {name}",
        )
    axis.set_ylim(bottom=0)
    _label_lengths(axis, rows)
    axis.set_title("decode step on the busy source")


def _label_lengths(axis: Any, rows: Sequence[Row]) -> None:
    axis.set_xlabel("tokens of the migrated request")
    if rows:
        axis.set_xscale("log", base=2)
        lengths = sorted({row["tokens"] for row in rows})
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.legend(fontsize="x-small")
