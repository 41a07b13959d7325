"""Figure 4: duration of a decode step over the tokens and requests in the batch (Section 3).

Three sources side by side: the paper's own steps on an A10, as far as they are published
(Figure 10's, 8k tokens in each batch); the step-time model that the simulations run on, at the
lengths of the paper's figure; and a profile of the real engine (bench/paper/decode_profile.py), of
another model on other hardware.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.common.results_io import RESULTS, read
from bench.common.tables import Row, markdown_table, number, rounded
from bench.paper.cells import Options
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import figure
from bench.paper.experiment import Experiment
from bench.paper.points import matching, paper_points
from sterna.simulator.paper import paper_config

LENGTHS = (64, 128, 256, 512, 1024)
MAX_TOTAL_TOKENS = 8192
MAX_FOREIGN_CORES = 0.1
"""Load of other programs above which a profile is unreliable."""
MODEL, ENGINE, PAPER = "simulated", "measured", "paper"


def rows(options: Options) -> list[Row]:
    """One row for each source, length and batch size."""
    return [*_model_rows(), *_paper_rows(), *_engine_rows()]


def _row(source: str, tokens_each: float, batch_size: float, step_ms: float) -> Row:
    return {
        "source": source,
        "tokens_each": int(tokens_each),
        "batch_size": int(batch_size),
        "total_tokens": int(tokens_each * batch_size),
        "step_ms": rounded(step_ms),
    }


def _model_rows() -> list[Row]:
    step_time = paper_config("llumnix", "M-M").step_time
    found = []
    for tokens_each in LENGTHS:
        batch_size = 1
        while batch_size * tokens_each <= MAX_TOTAL_TOKENS:
            total_tokens = batch_size * tokens_each
            step_s = step_time.duration_s(0, 0, batch_size, total_tokens)
            found.append(_row(MODEL, tokens_each, batch_size, 1000 * step_s))
            batch_size *= 2
    return found


def _paper_rows() -> list[Row]:
    return [
        _row(PAPER, each["sequence_length"], each["batch_size"], each["decode_step_normal_ms"])
        for each in matching(paper_points("figure10"), model="llama-7b")
    ]


def _engine_rows() -> list[Row]:
    if not (RESULTS / "decode_profile.json").exists():
        return []
    return [
        {
            **_row(ENGINE, each["tokens_each"], each["batch_size"], each["step_ms"]["median"]),
            "n": each["n"],
            "foreign_cores": each["foreign_cores"],
        }
        for each in read("decode_profile")["rows"]
    ]


def widest_gap(rows: Sequence[Row], source: str) -> float:
    """The longest step over the shortest one with requests of the same length."""
    gaps = []
    for length in {row["tokens_each"] for row in matching(list(rows), source=source)}:
        steps = [row["step_ms"] for row in matching(list(rows), source=source, tokens_each=length)]
        gaps.append(max(steps) / min(steps))
    return max(gaps, default=float("nan"))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 3: "the gap between the same sequence length is up to 2.6x"."""
    notes = {
        MODEL: "the simulations' step time, which serving's own costs are part of",
        ENGINE: "vLLM on this machine's CPU, a small model",
    }
    return [
        claim(
            "decode step: the slowest over the fastest with requests of the same length, up to",
            "3",
            Kind.FACTOR,
            2.6,
            rows,
            partial(widest_gap, source=source),
            note=note,
            is_judged=source == MODEL,
        )
        for source, note in notes.items()
    ]


def tables(rows: Sequence[Row]) -> str:
    """Steps of 8k tokens, ours and the paper's, and the profile."""
    step_time = paper_config("llumnix", "M-M").step_time
    lines = []
    for row in matching(list(rows), source=PAPER):
        modelled = 1000 * step_time.duration_s(0, 0, row["batch_size"], row["total_tokens"])
        lines.append(
            [
                str(row["tokens_each"]),
                str(row["batch_size"]),
                f"{number(modelled)} / {number(row['step_ms'])} ({modelled / row['step_ms']:.2f})",
            ]
        )
    parts = [
        "Decode steps of LLaMA-7B on A10 in ms, 8k tokens in the batch; the simulations' step "
        "time / the paper's points of Figure 10 (ratio):",
        markdown_table(["tokens each", "batch", "step"], lines, 0),
    ]
    measured = matching(list(rows), source=ENGINE)
    if measured:
        parts += [
            "Decode steps of the real engine on this machine's CPU in ms (SmolLM2-135M; "
            f"medians){_noise(measured)}:",
            _profile_table(measured),
        ]
    return "\n\n".join(parts)


def _noise(rows: Sequence[Row]) -> str:
    """A note for readers when the machine was not quiet."""
    foreign_cores = max(row["foreign_cores"] for row in rows)
    if foreign_cores <= MAX_FOREIGN_CORES:
        return ""
    return (
        f"; not a quiet machine: other programs kept up to {foreign_cores:.1f} cores busy, which "
        "makes steps longer than they are"
    )


def _profile_table(rows: Sequence[Row]) -> str:
    batches = sorted({row["batch_size"] for row in rows})
    lines = []
    for length in sorted({row["tokens_each"] for row in rows}):
        steps = {r["batch_size"]: r["step_ms"] for r in matching(list(rows), tokens_each=length)}
        lines.append([str(length), *(number(steps.get(each)) for each in batches)])
    return markdown_table(["tokens each", *(f"batch {each}" for each in batches)], lines, 0)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A line for each length, as in the paper; simulations left, the real engine right."""
    with figure(path, 1, 2, (4.6, 3.4)) as axes:
        for axis, source, title in (
            (axes[0][0], MODEL, "LLaMA-7B on A10: simulated, and the paper's points"),
            (axes[0][1], ENGINE, "SmolLM2-135M on this CPU: measured"),
        ):
            for length in sorted({r["tokens_each"] for r in matching(list(rows), source=source)}):
                line = matching(list(rows), source=source, tokens_each=length)
                axis.plot(
                    [row["total_tokens"] for row in line],
                    [row["step_ms"] for row in line],
                    marker="o",
                    markersize=4,
                    label=f"{length} tokens each",
                )
            if source == MODEL:
                points = matching(list(rows), source=PAPER)
                axis.plot(
                    [row["total_tokens"] for row in points],
                    [row["step_ms"] for row in points],
                    "ks",
                    markerfacecolor="none",
                    label="paper, 256 to 8k tokens each",
                )
            axis.set_title(title, fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("tokens in the batch")
            axis.set_ylabel("decode step [ms]")
            if axis.lines:
                axis.legend(fontsize=6)


FIGURE4 = Experiment(
    name="figure4",
    title="Figure 4: interference in a batch",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "kind": "measured, and the step-time model",
        "sources": "bench/results/decode_profile.json",
    },
)
