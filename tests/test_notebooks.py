"""The notebooks of docs: their code runs, and what they show was shown by it."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["cells"]
    return [each for each in cells if each["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda each: each.stem)
def test_every_cell_was_run_in_order_and_none_failed(path: Path) -> None:
    cells = code_cells(path)
    assert [each["execution_count"] for each in cells] == list(range(1, len(cells) + 1))
    outputs = [output["output_type"] for each in cells for output in each["outputs"]]
    assert {"execute_result", "display_data"} <= set(outputs)
    assert "error" not in outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda each: each.stem)
def test_its_code_still_runs(path: Path) -> None:
    """With few requests; `make notebook` runs it as it is."""
    matplotlib.use("Agg")
    source = "\n".join("".join(each["source"]) for each in code_cells(path))
    quick = source.replace('"requests": 2000', '"requests": 40')
    assert quick != source
    exec(compile(quick, path.name, "exec"), {})
