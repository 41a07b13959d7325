"""The page on traces says what is so: its names, commands, files and Python are all tried."""

import re
import shlex
from pathlib import Path

import pytest

from sterna.types import HIGH
from sterna.workload.arrivals import DAILY_MODELS, parse_arrivals, short_name
from sterna.workload.catalog import TRACES, Workload, build_trace
from sterna.workload.trace import Trace

PAGE = (Path(__file__).parents[2] / "docs" / "traces.md").read_text("utf-8")
COMMANDS = re.findall(r"^    (sterna simulate .*)$", PAGE, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FILES = re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(title: str) -> list[str]:
    """What is quoted as code in the first column of the section's table."""
    cells = re.findall(r"^\| (`.*?`) \|", section(title), re.MULTILINE)
    return [quoted for cell in cells for quoted in re.findall(r"`(.*?)`", cell)]


def run(command: str) -> Trace:
    """Build what the command names."""
    words = shlex.split(command)[2:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    known = {"--trace", "--rate", "--arrivals", "--requests", "--seed", "--high-fraction"}
    assert options.keys() <= known | {"--divide-lengths"}
    return build_trace(
        Workload(
            options["--trace"],
            int(options["--requests"]) if "--requests" in options else None,
            float(options["--rate"]) if "--rate" in options else None,
            options.get("--arrivals"),
            int(options.get("--seed", 0xCADE)),
            {HIGH: float(options.get("--high-fraction", 0.0))},
            divisor=int(options.get("--divide-lengths", 1)),
        )
    )


def test_the_page_is_read() -> None:
    assert len(COMMANDS) >= 10
    assert len(PYTHON) == 2
    assert [name for name, _ in FILES] == ["requests.csv", "requests.jsonl"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_a_workload(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    assert len(run(command)) > 0


@pytest.mark.parametrize("code", PYTHON)
def test_every_example_in_python_runs(code: str) -> None:
    exec(compile(code, "docs/traces.md", "exec"), {})


@pytest.mark.parametrize("name", first_cells("Names"))
def test_every_name_of_the_page_is_a_trace(name: str) -> None:
    # Those of the catalogue are built by its own tests.
    if name not in TRACES:
        assert build_trace(Workload(name, num_requests=5, rate=1.0)).name == name


def test_every_trace_of_the_catalogue_is_on_the_page() -> None:
    assert set(TRACES) <= set(first_cells("Names"))


@pytest.mark.parametrize("text", first_cells("Arrivals"))
def test_every_kind_of_arrivals_of_the_page_is_understood(text: str) -> None:
    parse_arrivals(text)
    trace = "azure-conv" if text == "recorded" else "fixed:1-1"
    rate = None if text.startswith("step") else 2.0
    assert len(build_trace(Workload(trace, num_requests=5, rate=rate, arrivals=text))) == 5


def test_every_service_with_days_is_on_the_page() -> None:
    for model in DAILY_MODELS:
        assert f"`{short_name(model)}`" in section("Arrivals")


@pytest.mark.parametrize(
    ("name", "column"),
    [
        (name, int(column.replace(",", "")))
        for name, column in re.findall(
            r"^\| `([\w-]+)` \| .* \| ([\d,]+) \| [^|]*\|$", section("Names"), re.MULTILINE
        )
    ],
)
def test_the_numbers_of_requests_on_the_page_are_right(name: str, column: int) -> None:
    assert len(build_trace(Workload(name, rate=1.0))) == column
