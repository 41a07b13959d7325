"""The rows of an interrupted run of `sterna bench migration`, kept until it has ended."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Unfinished:
    """The file of a run.

    Args:
        folder: where it is.
        quick: such runs have a file of their own, and leave that of the others alone.
        resume: take the rows of any run.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, quick: bool, resume: bool
    ) -> None:
        self._path = folder / ("migration_quick.json" if quick else "migration.json")
        self._key = _key(config)
        self._resume = resume

    def rows(self) -> list[dict[str, Any]]:
        """Those of a run of the same code and options that was interrupted."""
        try:
            unfinished = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return []
        rows: list[dict[str, Any]] = unfinished["rows"]
        return rows if self._resume or self._key == unfinished["key"] else []

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep these."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"key": self._key, "rows": rows}))

    def forget(self) -> None:
        """The run has ended."""
        self._path.unlink(missing_ok=True)


def _key(config: Mapping[str, Any]) -> str:
    """Names what is measured, and how: rows under another key are of another run."""
    digest = hashlib.sha256(json.dumps(config).encode())
    for folder in ("src", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
