"""The README's picture of downtimes, for light and for dark pages.

Drawn from `bench/results/migration.json` alone, by `sterna bench migration` and by

    python -m bench.migration.downtime_plot

The background is transparent and the text has the colour of the page's text, so that each picture
is readable on its kind of page.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import results_io

Row = Mapping[str, Any]

INK = {"light": "#1f2328", "dark": "#e6edf3"}
"""The colour of text, by the kind of page."""

TRANSPORT = "gloo"
"""The paper's wire (Section 5), which is the slowest of the three here."""

LINES = {
    ("recompute", None): ("recompute", "#d1701b", ":"),
    ("stop_copy", TRANSPORT): ("stop and copy", "#a371f7", "--"),
    ("live", TRANSPORT): ("live migration", "#2da44e", "-"),
}
"""Mode and transport of the rows; name, colour and style of their line."""

TICKS_MS = {10: "10 ms", 100: "100 ms", 1_000: "1 s", 10_000: "10 s"}


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write both pictures into the folder; returns their paths.

    Args:
        document: `migration.json`.
    """
    import matplotlib

    matplotlib.use("svg")
    # Makes the files of equal numbers equal.
    matplotlib.rcParams["svg.hashsalt"] = "sterna"
    idle = [row for row in document["rows"] if not row["busy"]]
    return [_draw(idle, ink, folder / f"downtime_{page}.svg") for page, ink in INK.items()]


def _draw(rows: Sequence[Row], ink: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 3.8))
    for (mode, transport), (name, colour, style) in LINES.items():
        points = [row for row in rows if (row["mode"], row["transport"]) == (mode, transport)]
        _line(axis, points, "downtime_ms", name, colour, style)
    live = [row for row in rows if (row["mode"], row["transport"]) == ("live", TRANSPORT)]
    _line(axis, live, "decode_step_ms", "one decode step", "#6e7781", "-.")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({row["tokens"] for row in live})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    # Room for the names at the ends of the lines.
    axis.set_xlim(lengths[0] * 0.9, lengths[-1] * 2.6)
    axis.set_yticks(list(TICKS_MS), list(TICKS_MS.values()))
    axis.set_xlabel("tokens of the request that moves", color=ink)
    axis.set_ylabel("downtime", color=ink)
    axis.tick_params(colors=ink, which="both")
    for side, spine in axis.spines.items():
        spine.set_color(ink)
        spine.set_visible(side in ("left", "bottom"))
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _line(
    axis: Any, points: Sequence[Row], measure: str, name: str, colour: str, style: str
) -> None:
    lengths = [row["tokens"] for row in points]
    values_ms = [row[measure]["median"] for row in points]
    axis.plot(lengths, values_ms, marker="o", markersize=4, color=colour, linestyle=style)
    axis.annotate(
        name,
        (lengths[-1], values_ms[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        color=colour,
        va="center",
    )


if __name__ == "__main__":
    for written in draw(results_io.read("migration"), results_io.RESULTS):
        print(f"written: {written}")
