"""Where the target load of `sterna serve` comes from."""

import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.serve.engine_options import checked_engine_config
from sterna.cli.serve.priority_options import with_target_load
from sterna.cli.serve.read_options import parse
from sterna.cli.serve.serve_options import cluster_config
from sterna.engine.emulated.profiles import A10_LLAMA_7B
from sterna.engine.profiling.profile_file import document, path_of, write
from sterna.errors import ConfigurationError
from sterna.types import HIGH, Priority
from tests.engine.profiling.test_profile_file import MEASUREMENT

pytestmark = pytest.mark.vllm

Lines = list[str]


class Server:
    """The options of one `sterna serve`, parsed."""

    def __init__(self, *options: str) -> None:
        self.args = parse(["serve", "--dtype", "bfloat16", *options])
        self.config = cluster_config(self.args)
        self.engine: Any = checked_engine_config(self.args)

    @property
    def key(self) -> dict[str, str]:
        from sterna.engine.vllm.facts import profile_key

        return profile_key(self.engine, self.args.num_threads)

    def target_loads(self, **changes: object) -> dict[Priority, int]:
        """The target loads that it starts with, were these options different."""
        args = Namespace(**{**vars(self.args), **changes})
        config = with_target_load(self.config, args, self.engine)
        return dict(config.llumlet.policy.target_load_tokens)


@pytest.fixture(scope="module")
def server() -> Server:
    """With the small model's own options, by which it holds 11,616 tokens."""
    return Server()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """An empty cache, in place of the one from which the server has its model."""
    monkeypatch.setenv("STERNA_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What is logged of target loads."""
    found: Lines = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "target load" in record.getMessage():
                found.append(f"{record.levelname} {record.getMessage()}")

    logger, handler = logging.getLogger("sterna.serve"), Keep()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def save(cache: Path, key: dict[str, str]) -> Path:
    path = path_of(cache, key)
    write(path, document(A10_LLAMA_7B, replace(MEASUREMENT, key=key)))
    return path


def test_without_a_profile_it_is_the_papers(server: Server, cache: Path, lines: Lines) -> None:
    """Section 6.4: "a target memory load of 1,600 tokens for high-priority requests"."""
    assert server.target_loads() == {HIGH: 1600}
    (line,) = lines
    assert line.startswith("INFO target load tokens=1600 from=default (the paper's")


def test_the_papers_is_cut_to_half_of_a_small_memory(cache: Path, lines: Lines) -> None:
    """32 MiB hold 45 blocks of 32 tokens, and vLLM keeps one."""
    small = Server("--kv-cache-memory-bytes", str(32 << 20), "--max-model-len", "512")

    assert small.target_loads() == {HIGH: 44 * 32 // 2}
    assert "half of the memory, which holds 1408" in lines[0]


def test_a_saved_profile_of_this_engine_is_found(server: Server, cache: Path, lines: Lines) -> None:
    path = save(cache, server.key)

    assert server.target_loads() == {HIGH: MEASUREMENT.target_load_tokens}
    assert lines == [f"INFO target load tokens={MEASUREMENT.target_load_tokens} from={path}"]


def test_the_option_goes_before_the_profile(server: Server, cache: Path, lines: Lines) -> None:
    save(cache, server.key)

    assert server.target_loads(target_load=700) == {HIGH: 700}
    assert lines == ["INFO target load tokens=700 from=--target-load"]


def test_a_profile_of_other_hardware_is_not_taken_and_the_log_says_why(
    server: Server, cache: Path, lines: Lines
) -> None:
    save(cache, {**server.key, "hardware": "a supercomputer"})

    assert server.target_loads() == {HIGH: 1600}
    assert "is of another engine: hardware a supercomputer instead of " in lines[0]


def test_a_broken_profile_is_a_warning_and_the_server_starts(
    server: Server, cache: Path, lines: Lines
) -> None:
    path = save(cache, server.key)
    path.write_text("{")

    assert server.target_loads() == {HIGH: 1600}
    assert lines[0].startswith(f"WARNING target load: the saved profile {path} cannot be used")


def test_options_that_change_steps_change_the_key_and_those_that_change_memory_do_not(
    server: Server,
) -> None:
    other = Server("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8")
    assert other.key == server.key
    slower = Server("--dtype", "float32", "--block-size", "64")
    different = {name for name in server.key if slower.key[name] != server.key[name]}
    assert different == {"dtype", "block_size"}


def test_a_class_with_a_target_load_of_its_own_keeps_it(
    server: Server, cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "classes.yaml"
    file.write_text(
        "[{name: high, rank: 1}, {name: urgent, rank: 2, target_load: 500},"
        " {name: normal, rank: 0}]"
    )
    save(cache, server.key)
    classes = parse(["serve", "--priority-classes", str(file), "--engine", "emulated"]).classes

    assert server.target_loads(classes=classes) == {
        Priority(1): MEASUREMENT.target_load_tokens,
        Priority(2): 500,
    }


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_target_load_that_is_not_positive_is_refused(
    server: Server, cache: Path, tokens: int
) -> None:
    with pytest.raises(ConfigurationError, match=f"--target-load must be at least 1, not {tokens}"):
        server.target_loads(target_load=tokens)


def test_a_policy_without_priorities_has_no_target_load(cache: Path, lines: Lines) -> None:
    plain = Server("--policy", "infaas++")

    plain.target_loads()
    assert lines == []
    with pytest.raises(ConfigurationError, match=r"--target-load 700: with --policy infaas\+\+"):
        plain.target_loads(target_load=700)


def test_an_emulated_engine_has_that_of_the_file_that_it_is_made_of(
    tmp_path: Path, lines: Lines
) -> None:
    path = tmp_path / "mine.json"
    write(path, document(A10_LLAMA_7B, MEASUREMENT))
    emulated = Server("--engine", "emulated", "--profile", str(path))

    assert emulated.target_loads() == {HIGH: MEASUREMENT.target_load_tokens}
    assert lines == [f"INFO target load tokens={MEASUREMENT.target_load_tokens} from={path}"]


def test_an_emulated_engine_by_name_has_the_papers(lines: Lines) -> None:
    assert Server("--engine", "emulated").target_loads() == {HIGH: 1600}
    assert lines[0] == "INFO target load tokens=1600 from=default (the paper's for LLaMA-7B on A10)"
