"""Options of vLLM that a rolling restart may change, by the real parser."""

import argparse

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


def test_an_option_by_which_front_ends_go_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the front ends go by it"):
        overridden("--max-model-len", "64")
