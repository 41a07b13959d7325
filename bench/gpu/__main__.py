"""The tables of docs/gpu.md, from the results of a machine with a CUDA device.

    python -m bench.gpu

Such a machine is not always there: what it has measured is copied into `bench/results`.

    sterna bench data-plane --device cuda       data_plane_cuda.json
    sterna bench migration                      migration_cuda.json
    sterna bench kinds                          model_kinds_cuda.json
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.common import results_io
from bench.common.pages import goal_list, write_marked
from bench.common.tables import markdown_table, number
from bench.kinds.cases import CASES
from bench.kinds.report import RECOVERIES, in_words, same_or_others
from bench.migration import data_plane_report
from bench.migration.goals import goals
from bench.migration.report import noise

COMMAND = "python -m bench.gpu"
PAGE = results_io.ROOT / "docs" / "gpu.md"

Document = Mapping[str, Any]


def main() -> None:
    """Write all tables."""
    for name, markdown in (
        ("data_plane_cuda", _copies),
        ("migration_cuda", _migrations),
        ("model_kinds_cuda", _kinds),
    ):
        document = results_io.read(name)
        write_marked(
            PAGE, f"{COMMAND}: {name}.json", f"{_origin(document)}\n\n{markdown(document)}"
        )
    print(f"written: {PAGE.relative_to(results_io.ROOT)}")


def _origin(document: Document) -> str:
    hardware = document["hardware"]
    versions = f"vLLM {hardware['vllm']}, PyTorch {hardware['torch']}"
    return (
        f"Measured on {document['date'][:10]} at commit {document['commit']}: one "
        f"{hardware['gpu']}, {hardware['num_cores']} cores, {versions}."
    )


def _copies(document: Document) -> str:
    return data_plane_report.markdown(document["rows"])


def _migrations(document: Document) -> str:
    rows = document["rows"]
    stopped = {
        (row["busy"], row["transport"], row["tokens"]): row["downtime_ms"]["median"]
        for row in rows
        if row["mode"] == "stop_copy"
    }
    lines = [
        [
            f"{'busy' if row['busy'] else 'idle'}, {row['transport']}, {row['tokens']:,} tokens",
            number(row["decode_step_ms"]["median"]),
            number(row["downtime_ms"]["median"]),
            number(row["downtime_ms"]["p99"]),
            number(row["downtime_ms"]["median"] / row["decode_step_ms"]["median"]),
            number(row["decode_step_migrating_ms"]["median"]),
            number(stopped.get((row["busy"], row["transport"], row["tokens"]))),
            str(row["stages"]),
            str(row["n"]),
        ]
        for row in rows
        if row["mode"] == "live"
    ]
    header = (
        *("instances, wire, request", "step [ms]", "downtime [ms]", "P99 [ms]", "in steps"),
        *("step meanwhile [ms]", "stop and copy [ms]", "stages", "moves"),
    )
    found = goal_list([asdict(each) for each in goals(rows)])
    return f"Medians.{noise(rows)}\n\n{markdown_table(header, lines)}\n\n{found}"


def _kinds(document: Document) -> str:
    lines = [
        [
            CASES[row["kind"]].title,
            in_words(row["groups"]),
            row["runner"],
            "yes" if row["batch_invariant"] else "no",
            same_or_others(row["token_identical"]),
            RECOVERIES[row["recovery"]],
            f"{row['downtime_ms']['median']:.1f}",
            f"{row['decode_step_ms']['median']:.1f}",
            str(row["neighbours"]),
        ]
        for row in document["rows"]
        if row["moves"]
    ]
    header = (
        *("tiny random model like", "its KV cache groups", "runner", "batch-invariant"),
        *("tokens after moves", "after a death", "downtime [ms]", "step [ms]", "neighbours"),
    )
    return markdown_table(header, lines, num_text=6)


if __name__ == "__main__":
    main()
