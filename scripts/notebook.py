"""Run the notebooks of docs/notebooks again, in place.

    make notebook

What a run leaves beside the outputs (times, versions) is removed, so that a notebook changes only
where its results do.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
TIMEOUT_S = 900


def execute(path: Path) -> None:
    """Run all cells of the notebook, and write it.

    Raises:
        CellExecutionError: a cell failed; nothing is written.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)


def main() -> int:
    """Run them all; returns the exit status."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        print(f"running {path.name}", file=sys.stderr, flush=True)
        try:
            execute(path)
        except CellExecutionError as error:
            print(f"notebook: {path.name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
