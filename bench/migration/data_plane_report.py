"""The results of `sterna bench data-plane`: tables, a summary and goals. Pure, from rows alone."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.common.comparison import Middle
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, markdown_table, number, rounded
from bench.migration.report import noise

LEAST_WIRE_SHARE = 0.8

LEAST_TOKENS = 256
"""Shorter transfers are shown, and have no goal: they take well below a millisecond."""


def wire_share(samples: Sequence[Sequence[float]]) -> Middle:
    """The wire's time over the transfer's, over pairs of (arrived, sent, wire)."""
    return Middle.of([wire_s / arrived_s for arrived_s, _, wire_s in samples])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The smallest share of the wire's rate, by model and transport."""
    return {
        **{
            name: rounded(min(each.median for each in shares))
            for name, shares in _shares(rows).items()
        },
        "goals": [asdict(each) for each in goals(rows)],
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What is to be reached with each model and transport, by the intervals of all lengths."""
    return [
        Goal(
            f"{name}, {LEAST_TOKENS} tokens and more: smallest share of the wire's rate",
            f"at least {LEAST_WIRE_SHARE:g}",
            min(shares, key=lambda each: each.median).text(2),
            _all([each.at_least(LEAST_WIRE_SHARE) for each in shares]),
        )
        for name, shares in _shares(rows).items()
    ]


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    lines = [
        [
            f"{row['model']}, {row['transport']}, {row['tokens']:,} tokens",
            number(row["copy_bytes"] / 2**20),
            number(row["wire_ms"]["median"]),
            number(row["arrived_ms"]["median"]),
            number(row["arrived_ms"]["p99"]),
            number(row["gb_per_s"]),
            Middle(**row["wire_share"]).text(2),
        ]
        for row in _transfers(rows)
    ]
    header = (
        *("transfer", "MiB", "wire alone [ms]", "transfer [ms]", "P99 [ms]", "GB/s"),
        "share of the wire's rate",
    )
    copies = [
        [
            f"{row['model']}, {row['operation']}",
            number(row["copy_bytes"] / 2**20),
            number(row["duration_ms"]["median"]),
            number(row["gb_per_s"]),
        ]
        for row in _largest_copies(rows)
    ]
    return "\n\n".join(
        [
            "Medians, with 90 % intervals of the shares over pairs of runs."
            + noise(_transfers(rows)),
            markdown_table(header, lines),
            "Blocks of a shuffled cache to and from a staging buffer, in one thread:",
            markdown_table(("copy", "MiB", "time [ms]", "GB/s"), copies),
            "The longest transfers, and what gathering, the wire and scattering take one after the "
            "other; below 1 they overlap:",
            markdown_table(
                ("transfer", "one after the other [ms]", "transfer [ms]", "ratio"), _overlaps(rows)
            ),
            goal_list([asdict(each) for each in goals(rows)]),
        ]
    )


def _overlaps(rows: Sequence[Row]) -> list[list[str]]:
    """Of each model and transport the longest transfer, beside the sum of its parts."""
    copies_ms = {
        (row["model"], row["tokens"], row["operation"]): row["duration_ms"]["median"]
        for row in rows
        if "duration_ms" in row
    }
    longest = {(row["model"], row["transport"]): row for row in _transfers(rows)}
    lines = []
    for (model, transport), row in longest.items():
        copies = [(model, row["tokens"], each) for each in ("gather", "scatter")]
        if not copies_ms.keys() >= set(copies):
            continue
        in_turn_ms = row["wire_ms"]["median"] + sum(copies_ms[each] for each in copies)
        transfer_ms = row["arrived_ms"]["median"]
        lines.append(
            [
                f"{model}, {transport}, {row['tokens']:,} tokens",
                *(number(in_turn_ms), number(transfer_ms), f"{transfer_ms / in_turn_ms:.2f}"),
            ]
        )
    return lines


def _transfers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "wire_share" in row]


def _shares(rows: Sequence[Row]) -> dict[str, list[Middle]]:
    """Those of transfers with a goal, by model and transport."""
    found: dict[str, list[Middle]] = {}
    for row in _transfers(rows):
        if row["tokens"] >= LEAST_TOKENS:
            name = f"{row['model']}, {row['transport']}"
            found.setdefault(name, []).append(Middle(**row["wire_share"]))
    return found


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    """Whether all hold; None: not decided."""
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _largest_copies(rows: Sequence[Row]) -> list[Row]:
    largest = {
        (row["model"], row["operation"]): row
        for row in rows
        if row["operation"] in ("gather", "scatter")
    }
    return list(largest.values())
