"""An instance's configuration, from options that are read once and used in several processes."""

import copy
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from sterna.errors import ConfigurationError
from sterna.types import InstanceId
from tests.models import tiny_random_llama

pytestmark = pytest.mark.vllm

PLUGIN = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("of-a-plugin")
class Parser(ReasoningParser):
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_random_llama(tmp_path_factory.mktemp("models") / "tiny", seed=1))


def options(model: str, *given: str) -> Namespace:
    from sterna.engine.vllm.arguments import make_serve_parser, parse_serve

    arguments = ["serve", model, "--dtype", "float32", *given]
    args = parse_serve(*make_serve_parser(), arguments, "no default")
    args.model = args.model_tag
    return args


def config(args: Namespace, instance_id: str | None = None) -> Any:
    from sterna.engine.vllm.hosted_core import engine_config

    return engine_config(args, None if instance_id is None else InstanceId(instance_id))


def test_options_that_were_checked_can_be_used(model: str) -> None:
    """vLLM writes the short options of speculation into the value of the long one."""
    tokens = '{"num_speculative_tokens": 3}'
    args = options(model, "--speculative-config", tokens, "--spec-method", "ngram")
    before = copy.deepcopy(vars(args))
    assert config(args).speculative_config.method == "ngram"
    assert vars(args) == before
    assert config(args).speculative_config.num_speculative_tokens == 3


def test_a_reasoning_parser_may_come_with_a_plugin(model: str, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    config(options(model, "--reasoning-parser-plugin", str(plugin)))
    from vllm.reasoning import ReasoningParserManager

    assert "of-a-plugin" in ReasoningParserManager.list_registered()


def test_each_instance_has_an_id_of_its_own_for_connectors(model: str) -> None:
    """They find memory that is shared, and peers, by it."""
    transfer = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'
    args = options(model, "--kv-transfer-config", transfer)
    engine_ids = [config(args, each).kv_transfer_config.engine_id for each in ("i0", "i1")]
    assert engine_ids[0].endswith("_i0")
    assert engine_ids[1] == engine_ids[0].removesuffix("i0") + "i1"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            ("--prefill-context-parallel-size", "2"),
            "Model Runner V1 does not support: prefill context parallel",
        ),
        (("--enable-trace-replay",), "trace replay requires Model Runner V2"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_a_refusal_by_the_model_runner_names_the_variable_that_chooses_it(
    given: tuple[str, ...], reason: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable vLLM itself would choose V2, on GPUs."""
    from sterna.cli.serve.engine_options import checked_engine_config

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    args = options(model, *given)
    args.emulated = None
    message = f"{reason} (sterna serve chooses V1: set VLLM_USE_V2_MODEL_RUNNER=1)"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        checked_engine_config(args)
