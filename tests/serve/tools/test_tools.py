"""The commands of docs/benchmarking.md, against a real server whose requests move all the time.

    make test-tools        # installs each tool into an environment of its own

Each tool is of the version that the page names.
"""

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import small_model
from tests.serve.mover import Mover
from tests.serve.server import MODEL_NAME, ServerProcess, start_plain, start_sterna

pytestmark = [
    *(pytest.mark.ray, pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(3600)),
]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarking.md"
ENVIRONMENTS = ROOT / ".cache" / "tools-of-others"

PACKAGES = {
    "guidellm": "guidellm=={version}",
    "aiperf": "aiperf=={version}",
    "lm-eval": "lm-eval[api]=={version} transformers",
    "LangChain": "langchain-openai=={version}",
    "LiteLLM": "litellm=={version}",
}
RUN_TIMEOUT_S = 900.0


def section(title: str) -> str:
    pattern = rf"^## [^\n]*{re.escape(title)}[^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def command(title: str) -> str:
    """The command of a section, as one line of shell."""
    lines = [line[4:] for line in section(title).splitlines() if line.startswith("    ")]
    return "\n".join(lines)


def folder_of(tool: str) -> Path:
    """The commands of the tool, in an environment of its own, which is made once."""
    version = re.search(rf"^{re.escape(tool)} ([\d.]+)\.", section(tool), re.MULTILINE)
    assert version is not None, "the page names a version"
    folder = ENVIRONMENTS / f"{tool}-{version[1]}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        package = PACKAGES[tool].format(version=version[1])
        python = folder / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *package.split()], check=True)
        (folder / "complete").touch()
    return folder / "bin"


def run(line: str, server: ServerProcess, path: Path, folder: Path, *options: str) -> str:
    """Run a command of the page; returns what it printed."""
    environment = {
        **os.environ,
        "URL": server.url,
        "MODEL": MODEL_NAME,
        "TOKENIZER": str(small_model()),
        "PATH": f"{path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", f"{line} {' '.join(options)}"],
        cwd=ROOT if "tests/" in line else folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sterna() -> Iterator[ServerProcess]:
    server = start_sterna("--instances", "2")
    yield server
    server.end()


def test_vllms_own_benchmark(sterna: ServerProcess, tmp_path: Path) -> None:
    line = command("vllm bench serve").replace(
        "vllm bench", f"PYTHONPATH={ROOT} {sys.executable} -m bench.plain_vllm.vllm_command bench"
    )
    with Mover(sterna, "vllm") as mover:
        printed = run(line, sterna, Path(sys.executable).parent, tmp_path)
    assert re.search(r"Successful requests: +24\b", printed), printed
    assert mover.total > 0


def test_guidellm(sterna: ServerProcess, tmp_path: Path) -> None:
    with Mover(sterna, "guidellm") as mover:
        run(command("guidellm"), sterna, folder_of("guidellm"), tmp_path)
    (report,) = tmp_path.glob("benchmarks.json")
    (found,) = json.loads(report.read_text())["benchmarks"]
    assert found["metrics"]["request_totals"]["successful"] == 24
    assert mover.total > 0


def test_aiperf(sterna: ServerProcess, tmp_path: Path) -> None:
    with Mover(sterna, "aiperf") as mover:
        run(command("aiperf"), sterna, folder_of("aiperf"), tmp_path)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 24
    assert mover.total > 0


@pytest.mark.parametrize("client", ["LangChain", "LiteLLM"])
def test_a_client_library(sterna: ServerProcess, tmp_path: Path, client: str) -> None:
    """The stream says what the answer does in one piece; a tool that is named is called."""
    with Mover(sterna, client) as mover:
        printed = run(command(client), sterna, folder_of(client), tmp_path)
    found = json.loads(printed.splitlines()[-1])
    assert found["streamed"] == found["answer"] != ""
    assert found["num_chunks"] > 10
    assert 10 < found["output_tokens"] <= 64
    assert (found["tool"], found["arguments"]) == (["weather"], [["city"]])
    assert found["structured"] == ["legs", "name"]
    assert mover.total > 0


def evaluated(server: ServerProcess, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The scores, and each answer."""
    line = command("lm-eval")
    options = (f"--output_path {folder}", "--log_samples")
    run(line, server, folder_of("lm-eval"), folder, *options)
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    answers = [json.loads(each) for each in samples.read_text().splitlines()]
    scores = json.loads(results.read_text())["results"]["birds"]
    return scores, sorted((each["doc_id"], each["resps"]) for each in answers)


def test_lm_eval_scores_as_with_plain_vllm(sterna: ServerProcess, tmp_path: Path) -> None:
    with Mover(sterna, "lm-eval") as mover:
        ours = evaluated(sterna, tmp_path / "sterna")
    assert mover.total > 0
    plain = start_plain()
    try:
        assert evaluated(plain, tmp_path / "plain") == ours
    finally:
        plain.end()
