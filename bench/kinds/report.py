"""Rows of `sterna bench kinds`, and the tables of the pages that are written from them."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from bench.common import results_io
from bench.kinds.cases import CASES
from bench.kinds.findings import Found, Recovery

Row = Mapping[str, Any]

MAX_FOREIGN_CORES = 0.1
"""Load of other programs above which times are unreliable."""

CACHES = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "latent",
    "MambaSpec": "recurrent state",
}
"""Words for vLLM's kinds of KV cache groups."""


RECOVERIES = {
    Recovery.SAME.value: "the same",
    Recovery.AS_RECOMPUTED.value: "those of vLLM's recompute",
    Recovery.OTHER.value: "**others**",
}
"""Words for the tokens after a death."""

KIND, GROUPS = "tiny random model like", "its KV cache groups"

NUMBERS = (
    "stages",
    "last stage",
    "downtime",
    "downtime, ms",
    "P99",
    "decode step, ms",
    "neighbours",
)
"""Columns of numbers."""


def row_of(kind: str, found: Found) -> dict[str, Any]:
    """The row of a kind; measured values are None where nothing moves.

    `stages` and `last_stage_bytes` are the largest of any migration.
    """
    moves = found.moves
    steps_ms = [step for move in moves for step in move.sample.steps_ms]
    return {
        "kind": kind,
        "model_type": found.model_type,
        "groups": list(found.groups),
        "moves": found.reason is None,
        "reason": found.reason,
        "token_identical": found.is_same,
        "recovered_identical": None if found.recovery is None else found.recovery is Recovery.SAME,
        "recovery": None if found.recovery is None else found.recovery.value,
        "stages": max((len(move.stage_bytes) for move in moves), default=None),
        "downtime_ms": results_io.summary([move.sample.downtime_ms for move in moves])
        if moves
        else None,
        "decode_step_ms": results_io.summary(steps_ms) if moves else None,
        "last_stage_bytes": max((move.stage_bytes[-1] for move in moves), default=None),
        "n": len(moves),
        "neighbours": found.num_neighbours,
        "foreign_cores": round(found.foreign_cores, 2),
        "commit": results_io.measured_commit(),
    }


def line_of(row: Row) -> str:
    """The row in words, for the progress."""
    if not row["moves"]:
        return f"{row['kind']}: does not move: {row['reason']}"
    return (
        f"{row['kind']}: tokens {same_or_others(row['token_identical'])}, after a death "
        f"{RECOVERIES[row['recovery']]}; downtime {_median(row, 'downtime_ms')} ms (p99 "
        f"{row['downtime_ms']['p99']:.1f}), step {_median(row, 'decode_step_ms')} ms, "
        f"stages {row['stages']}, last stage {in_kib(row['last_stage_bytes'])}, n={row['n']}"
    )


def readme_table(document: Mapping[str, Any] | None) -> str:
    """The README's table of kinds.

    Args:
        document: `model_kinds.json`; None where nothing is measured yet.
    """
    shown = {kind for kind, case in CASES.items() if case.is_in_readme}
    rows = {kind: row for kind, row in _rows(document).items() if kind in shown}
    lines = []
    for kind, row in rows.items():
        cells = [CASES[kind].title, in_words(row["groups"])]
        if row["moves"]:
            cells += ["yes", same_or_others(row["token_identical"]), RECOVERIES[row["recovery"]]]
            cells.append(f"{_median(row, 'downtime_ms')} ms")
        else:
            cells += [f"no: {row['reason']}", "", "", ""]
        lines.append(cells)
    columns = [KIND, GROUPS, "moves", "tokens after moves", "after a death", "downtime"]
    return _paragraphs(_table(columns, lines), _unmeasured(rows, shown))


def models_table(document: Mapping[str, Any] | None) -> str:
    """The tables of docs/models.md: costs of the kinds that move, reasons of the others.

    Args:
        document: `model_kinds.json`; None where nothing is measured yet.
    """
    rows = _rows(document)
    moving = {kind: row for kind, row in rows.items() if row["moves"]}
    others = {kind: row for kind, row in rows.items() if not row["moves"]}
    headline = "" if document is None else _headline(document, list(rows.values()))
    return _paragraphs(headline, _costs(moving), _reasons(others), _unmeasured(rows, set(CASES)))


def has_right_tokens(row: Row) -> bool:
    """Whether the tokens of requests that moved, and of one whose instance died, are as expected;
    also where nothing moves."""
    return row["token_identical"] is not False and row["recovery"] != Recovery.OTHER.value


def in_words(groups: Sequence[str]) -> str:
    """KV cache groups, those of equal kind together."""
    counts = Counter(CACHES.get(group, group) for group in groups)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())


def in_kib(num_bytes: int) -> str:
    """Bytes in KiB, such as "1,024 KiB"."""
    return f"{num_bytes / 1024:,.0f} KiB"


def _rows(document: Mapping[str, Any] | None) -> dict[str, Row]:
    """The rows of the cases that exist, in their order, with vLLM's V1 model runner."""
    found = [] if document is None else document["rows"]
    rows = {row["kind"]: row for row in found if row.get("runner", "V1") == "V1"}
    return {kind: rows[kind] for kind in CASES if kind in rows}


def _headline(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    hardware, config = document["hardware"], document["config"]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    text = (
        f"Measured on {document['date'][:10]} at commit {commits}: {hardware['cpu']}, "
        f"{hardware['num_cores']} cores, two instances on one host over {config['transport']}. "
        "[All numbers](../bench/results/model_kinds.json)."
    )
    foreign_cores = max((row["foreign_cores"] for row in rows), default=0.0)
    if foreign_cores > MAX_FOREIGN_CORES:
        text += f" Not a quiet machine: other programs kept up to {foreign_cores:.1f} cores busy."
    return text


def _costs(rows: Mapping[str, Row]) -> str:
    columns = [
        KIND,
        GROUPS,
        "moves",
        "tokens after them",
        "after a death",
        "stages",
        "last stage",
        "downtime, ms",
        "P99",
        "decode step, ms",
        "neighbours",
    ]
    lines = [
        [
            f"{CASES[kind].title} (`{row['model_type']}`)",
            in_words(row["groups"]),
            str(row["n"]),
            same_or_others(row["token_identical"]),
            RECOVERIES[row["recovery"]],
            str(row["stages"]),
            in_kib(row["last_stage_bytes"]),
            _median(row, "downtime_ms"),
            f"{row['downtime_ms']['p99']:.1f}",
            _median(row, "decode_step_ms"),
            str(row["neighbours"]),
        ]
        for kind, row in rows.items()
    ]
    return _table(columns, lines)


def _reasons(rows: Mapping[str, Row]) -> str:
    lines = [[CASES[kind].title, row["reason"]] for kind, row in rows.items()]
    return _table(["served without migration", "because of"], lines)


def _unmeasured(rows: Mapping[str, Row], kinds: Set[str]) -> str:
    left = [CASES[kind].title for kind in CASES if kind in kinds and kind not in rows]
    return f"Not measured yet: {'; '.join(left)}." if left else ""


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; "" without lines."""
    rules = ["---:" if name in NUMBERS else "---" for name in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rules, *lines) if lines)


def same_or_others(is_same: bool) -> str:
    """The words of tables for tokens that are the same as expected, or not."""
    return "the same" if is_same else "**others**"


def _median(row: Row, name: str) -> str:
    return f"{row[name]['median']:.1f}"
