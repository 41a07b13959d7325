"""Options of the small model where the user gives none, and warnings."""

import pytest
import vllm.engine.arg_utils
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform

from sterna.cli.serve.engine_options import SMALL_MODEL_WEIGHT_BYTES, checked_engine_config
from sterna.cli.serve.read_options import parse
from sterna.engine.model_files import weight_bytes_of
from sterna.engine.vllm import arguments
from sterna.engine.vllm.facts import total_tokens
from sterna.errors import ConfigurationError
from tests.models import small_model

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32", "float"])
def test_a_request_of_full_length_fits_whatever_the_precision(dtype: str) -> None:
    """In 32 bits a token takes twice the memory."""
    args = parse(["serve", "--dtype", dtype])
    num_tokens = total_tokens(checked_engine_config(args))
    assert num_tokens is not None
    assert args.max_model_len == 8192 <= num_tokens < 12_000


def test_its_weights_are_as_large_as_a_check_of_the_machine_assumes() -> None:
    weight_bytes = weight_bytes_of(small_model())
    assert weight_bytes <= SMALL_MODEL_WEIGHT_BYTES < weight_bytes + (1 << 20)


def test_memory_that_is_given_is_what_there_is() -> None:
    args = parse(["serve", "--dtype", "float32", "--kv-cache-memory-bytes", "100000000"])
    assert args.kv_cache_memory_bytes == 100_000_000


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "computed_in", "is_warned_of"),
    [
        ("auto", False, "float32", False),
        ("bfloat16", False, "bfloat16", True),
        ("auto", True, "bfloat16", False),
        ("float32", False, "float32", False),
    ],
)
def test_it_is_computed_in_what_the_processor_has_instructions_for_unless_an_option_says_otherwise(
    dtype: str,
    has_bfloat16: bool,
    computed_in: str,
    is_warned_of: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is of bfloat16, which CPUs without AVX-512 compute in software."""
    monkeypatch.setattr("sterna.engine.vllm.facts._has_bfloat16", lambda: has_bfloat16)
    warnings: list[str] = []
    monkeypatch.setattr("sterna.cli.serve.engine_options.logger.warning", warnings.append)
    config = checked_engine_config(parse(["serve", "--dtype", dtype]))
    assert str(config.model_config.dtype) == f"torch.{computed_in}"
    assert any("--dtype float32" in each for each in warnings) is is_warned_of


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(False, "float32"), (True, "auto")])
def test_paced_engines_compute_in_the_same(
    has_bfloat16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sterna.engine.vllm.facts._has_bfloat16", lambda: has_bfloat16)
    assert parse(["serve", "--engine", "paced", "--profile", "a10-llama-7b"]).dtype == dtype


def test_a_build_for_gpus_that_finds_none_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without --gpus: vLLM's own error is no ValueError."""
    args = parse(["serve"])
    for module in (vllm.platforms, vllm.engine.arg_utils, arguments):
        monkeypatch.setattr(module, "current_platform", UnspecifiedPlatform(), raising=False)
    with pytest.raises(ConfigurationError, match=r"it finds none: check the driver .*--gpus all"):
        checked_engine_config(args)
