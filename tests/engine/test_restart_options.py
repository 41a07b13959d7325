"""Options of vLLM that a rolling restart may change, by the real parser."""

import argparse
from dataclasses import fields

import pytest

from sterna.errors import ConfigurationError

pytestmark = pytest.mark.vllm


def overridden(*options: str, has_key: bool = True) -> dict[str, object]:
    """What a server with a maximum of 8 requests has after a restart with these options."""
    from sterna.engine.vllm.arguments import HARMLESS_OPTIONS, with_options

    before = argparse.Namespace(max_num_seqs=8, port=8000)
    return vars(with_options(before, options, only=None if has_key else HARMLESS_OPTIONS))


def test_given_options_replace_those_of_the_server() -> None:
    assert overridden("--max-num-seqs", "64") == {"max_num_seqs": 64, "port": 8000}
    assert overridden() == {"max_num_seqs": 8, "port": 8000}


def test_a_model_needs_a_key() -> None:
    assert overridden("--model", "other")["model"] == "other"
    with pytest.raises(ConfigurationError, match="give the server an API key"):
        overridden("--model", "other", has_key=False)


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("as_one_word", [True, False])
def test_a_file_of_options_is_refused(tmp_path, has_key: bool, as_one_word: bool) -> None:
    """It may have other contents when an instance reads it, seconds or days later."""
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 64\n")
    options = [f"--config={file}"] if as_one_word else ["--config", str(file)]
    with pytest.raises(ConfigurationError, match="--config is not for a rolling restart"):
        overridden(*options, has_key=has_key)


@pytest.mark.parametrize(
    "options",
    [
        ("--max-model-len", "64"),
        ("--max-logprobs", "64"),
        ("--stream-interval", "4"),
        ("--enable-lora",),
        ("--block-size", "64"),
        ("--allowed-local-media-path", "/"),
        ("--port", "8001"),
    ],
    ids=lambda each: each[0],
)
def test_an_option_by_which_front_ends_go_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="the front ends go by it"):
        overridden(*options)


@pytest.mark.parametrize(
    "options",
    [
        ("--tensor-parallel-size", "2"),
        ("--data-parallel-size", "2"),
        ("--scheduler-cls", "a.Scheduler"),
    ],
    ids=lambda each: each[0],
)
def test_an_option_that_is_checked_at_the_start_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="the server checks it when it starts"):
        overridden(*options)


def test_options_that_restarts_know_are_vllms() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from sterna.engine.vllm.arguments import FRONTEND_OPTIONS, HARMLESS_OPTIONS, INSTANCE_OPTIONS

    known = FRONTEND_OPTIONS | HARMLESS_OPTIONS | INSTANCE_OPTIONS
    assert known <= {each.name for each in fields(EngineArgs)}
    assert len(known) == len(FRONTEND_OPTIONS) + len(HARMLESS_OPTIONS) + len(INSTANCE_OPTIONS)
