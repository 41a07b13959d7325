"""The profiles are what their tables say, and files are read or refused in words."""

import csv
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.profiles import PROFILES, Profile, profile, with_serving
from sterna.engine.profiling.fitting import DecodePoint, PrefillPoint, fit_decode, fit_step_time
from sterna.errors import ConfigurationError

Column = NDArray[np.float64]

DATA = resources.files("sterna.engine.emulated") / "data"

NUM_PARAMETERS = {"llama-7b": 6_738_415_616, "llama-30b-tp4": 32_528_943_616}
LAYERS_AND_WIDTH = {"llama-7b": (32, 4096), "llama-30b-tp4": (60, 6656)}
A10_PROFILES = {"llama-7b": "a10-llama-7b", "llama-30b-tp4": "a10x4-llama-30b"}


def table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((DATA / name).read_text("utf-8").splitlines()))


def a10_points(model: str, quantity: str) -> list[tuple[int, int, float]]:
    """(batch size, tokens in all, seconds) of each row."""
    return [
        (int(row["batch_size"]), int(row["total_tokens"]), float(row["ms"]) / 1e3)
        for row in table("a10_llama_measured.csv")
        if row["model"] == model and row["quantity"] == quantity
    ]


def kv_per_weights(model: str) -> float:
    """Keys and values of one token over the weights, both in 16 bits."""
    num_layers, width = LAYERS_AND_WIDTH[model]
    return 2 * num_layers * width / NUM_PARAMETERS[model]


def assert_same_constants(fitted: StepTime, written: StepTime) -> None:
    assert written.constants == pytest.approx(fitted.constants, rel=1e-4)


@pytest.mark.parametrize(("model", "name"), list(A10_PROFILES.items()))
def test_the_a10_profiles_are_the_fits_of_their_table(model: str, name: str) -> None:
    prefills = [PrefillPoint(tokens, s) for _, tokens, s in a10_points(model, "prefill")]
    decodes = [DecodePoint(*each) for each in a10_points(model, "decode_step")]
    copies = a10_points(model, "blocking_copy")
    blocks = np.array([float(tokens // 16) for _, tokens, _ in copies])
    copy_s = np.array([s for *_, s in copies])

    steps = fit_step_time(prefills, decodes, kv_per_weights=kv_per_weights(model))
    stage_s, block_s = relative_fit([np.ones_like(blocks), blocks], copy_s)

    assert_same_constants(steps.step_time, profile(name).step_time)
    assert profile(name).copy_time.block_s == pytest.approx(block_s, rel=1e-4)
    assert profile(name).copy_time.stage_s == pytest.approx(stage_s, rel=1e-4)
    # What the docstrings say of the fit.
    copy_error = np.abs((stage_s + block_s * blocks) / copy_s - 1).mean()
    means = (steps.prefill.mean, steps.decode.mean, copy_error)
    said = {"llama-7b": (0.009, 0.007, 0.027), "llama-30b-tp4": (0.025, 0.031, 0.034)}
    assert means == pytest.approx(said[model], abs=0.0006)


def test_the_rtx4090_profile_is_the_fit_of_its_tables() -> None:
    decodes = [
        DecodePoint(
            int(row["batch_size"]),
            int(row["batch_size"]) * int(row["context_tokens_each"]),
            float(row["step_ms"]) / 1e3,
        )
        for row in table("rtx4090_llama31_8b_decode.csv")
    ]
    prefills = [
        PrefillPoint(int(row["prompt_tokens"]), float(row["step_ms"]) / 1e3)
        for row in table("rtx4090_llama31_8b_prefill.csv")
    ]

    steps = fit_step_time(prefills, decodes)

    assert_same_constants(steps.step_time, profile("rtx4090-llama-3.1-8b").step_time)
    assert steps.prefill.mean == pytest.approx(0.030, abs=0.0006)
    assert steps.prefill.max == pytest.approx(0.117, abs=0.001)
    assert steps.decode.mean == pytest.approx(0.013, abs=0.0006)


def test_the_h100_profile_is_the_fit_of_its_tables() -> None:
    """Attention grows with the pairs of tokens, the rest with the tokens, above the floor of short
    prompts."""
    rows = table("h100_llama31_8b_prefill.csv")
    tokens = np.array([float(row["prompt_tokens"]) for row in rows])
    step_s = np.array([float(row["step_ms"]) for row in rows]) / 1e3
    attention_s = np.array([float(row["attention_ms"]) for row in rows]) / 1e3
    _, pair_s = relative_fit([np.ones_like(tokens), tokens**2], attention_s)
    is_above = tokens > 32
    rest_s = (step_s - pair_s * tokens**2)[is_above]
    prefill_s, token_s = relative_fit([np.ones_like(rest_s), tokens[is_above]], rest_s)
    decodes = [
        DecodePoint(int(row["batch_size"]), 0, float(row["step_ms"]) / 1e3)
        for row in table("h100_llama31_8b_decode.csv")
    ]
    kv_per_weights = 2 * 32 * 8 * 128 / 8_030_261_248
    decode = fit_decode(decodes, kv_per_weights)

    fitted = StepTime(prefill_s, token_s, pair_s, float(step_s[:2].mean()), *decode)
    assert_same_constants(fitted, profile("h100-llama-3.1-8b").step_time)
    # What the docstring says of the fit.
    errors = [
        fitted.duration_s(int(n), int(n) ** 2, 0, 0) / s - 1
        for n, s in zip(tokens, step_s, strict=True)
    ]
    assert np.abs(errors).mean() == pytest.approx(0.044, abs=0.0006)
    assert np.abs(errors).max() == pytest.approx(0.095, abs=0.0006)
    errors = [
        fitted.duration_s(0, 0, each.num_requests, 0) / each.duration_s - 1 for each in decodes
    ]
    assert np.abs(errors).mean() == pytest.approx(0.033, abs=0.0006)
    assert fitted.duration_s(100_000, 100_000**2, 0, 0) == pytest.approx(15.6, abs=0.1)


def relative_fit(columns: list[Column], measured: Column) -> tuple[float, ...]:
    """Least squares on the relative error."""
    relative = np.stack(columns, axis=1) / measured[:, None]
    solution, *_ = np.linalg.lstsq(relative, np.ones(len(measured)))
    return tuple(solution.tolist())


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "memory_gib", "device"),
    [
        ("rtx4090-llama-3.1-8b", 24, "NVIDIA GeForce RTX 4090"),
        ("h100-llama-3.1-8b", 79, "NVIDIA H100 80GB HBM3"),
    ],
)
def test_engines_of_vllm_1_have_the_limits_of_its_server_on_such_a_gpu(
    name: str, memory_gib: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the watermark, which is the same on all of them."""
    from vllm.config import SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    gpu = SimpleNamespace(
        get_device_total_memory=lambda: memory_gib << 30,
        get_device_name=lambda: device,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", gpu)
    tokens, requests = arg_utils.EngineArgs.get_batch_defaults(world_size=1)

    engine = profile(name).engine

    server = UsageContext.OPENAI_API_SERVER
    limits = engine.max_num_batched_tokens, engine.max_num_seqs, engine.watermark
    assert limits == (tokens[server], requests[server], SchedulerConfig.watermark)


def test_the_a10s_memory_is_the_artifacts() -> None:
    blocks = {int(row["num_gpu_blocks"]) for row in table("kv_capacity_a10_llama7b.csv")}

    assert profile("a10-llama-7b").engine.num_blocks in blocks


def test_the_rtx4090_copies_as_many_bytes_a_second_as_the_a10() -> None:
    """8 key-value heads in place of 32, in as many layers of heads as wide: a quarter."""
    a10, rtx4090 = profile("a10-llama-7b").copy_time, profile("rtx4090-llama-3.1-8b").copy_time

    assert rtx4090.block_s == pytest.approx(a10.block_s / 4, rel=1e-4)
    assert rtx4090.stage_s == a10.stage_s


def test_serving_adds_to_every_step_request_and_token_of_a_decode() -> None:
    alone = profile("a10-llama-7b").step_time
    served = with_serving(alone, step_s=1e-3, request_s=0.5e-3, token_s=1e-6)

    decode_s = served.duration_s(0, 0, 10, 5000) - alone.duration_s(0, 0, 10, 5000)
    prefill_s = served.duration_s(256, 256**2, 0, 0) - alone.duration_s(256, 256**2, 0, 0)
    shortest_s = served.duration_s(1, 1, 0, 0) - alone.duration_s(1, 1, 0, 0)

    assert decode_s == pytest.approx(1e-3 + 10 * 0.5e-3 + 5000 * 1e-6)
    assert prefill_s == pytest.approx(1e-3)
    assert shortest_s == pytest.approx(1e-3 + 0.5e-3)


# ------------------------------------------------------------------------------------------- files


def document_of(profile: Profile) -> dict[str, Any]:
    """The profile as it stands in a file."""
    document: dict[str, Any] = msgspec.to_builtins(profile)
    return document


def written(path: Path, document: object) -> str:
    """The document as a file, in the format of the path's suffix."""
    text = json.dumps(document) if path.suffix == ".json" else yaml.safe_dump(document)
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("each", PROFILES.values(), ids=list(PROFILES))
@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_profile_is_read_back_as_it_was_written(
    each: Profile, suffix: str, tmp_path: Path
) -> None:
    assert profile(written(tmp_path / f"mine{suffix}", document_of(each))) == each


def test_the_documented_form_can_be_read(tmp_path: Path) -> None:
    """YAML takes `5.1e-9` for a number, but `5e-9`, as in JSON, for text."""
    from sterna.engine.emulated import profiles

    assert profiles.__doc__ is not None
    form = profiles.__doc__.split("::\n", 1)[1].replace("5.1e-9", "5e-9")
    path = tmp_path / "form.yaml"
    path.write_text(form)

    read = profile(str(path))

    assert read.name == "a10-llama-7b"
    assert read.step_time.prefill_pair_s == 5e-9
    assert read.engine.block_size == 16


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["step_time"].update(decode_s="fast"), "step_time.decode_s is 'fast'"),
        (lambda d: d["step_time"].update(decode_s=-1.0), "step_time: decode_s must be .* not -1.0"),
        (lambda d: d["step_time"].update(decode_s=float("nan")), "step_time.decode_s must be fini"),
        (lambda d: d["step_time"].pop("decode_s"), "step_time.decode_s is missing"),
        (lambda d: d["engine"].update(num_blocks=2.5), "engine.num_blocks is 2.5"),
        (lambda d: d["engine"].update(num_blocks=0), "engine: num_blocks must be .* not 0"),
        (lambda d: d["engine"].update(blocks=7), r"engine.blocks \(7\) is not a field: use num_"),
        (
            lambda d: d["engine"].update(step_mode="mixed"),
            "engine.step_mode must be prefill_first or chunked, not 'mixed'",
        ),
        (lambda d: d.update(engine=3), "engine of profile .*mine.yaml must be a mapping"),
        (lambda d: d.update(copy_time=None), "copy_time of profile .*mine.yaml must be a mapping"),
        (lambda d: d.pop("name"), "mine.yaml: name is missing"),
        (lambda d: d.update(gpu="a10"), r"mine.yaml: gpu \('a10'\) is not a field"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_field_and_value(
    change: Change, message: str, tmp_path: Path
) -> None:
    document = document_of(profile("a10-llama-7b"))
    change(document)

    with pytest.raises(ConfigurationError, match=message) as caught:
        profile(written(tmp_path / "mine.yaml", document))
    assert "mine.yaml" in str(caught.value)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be a mapping of fields, not \\[1, 2\\]"):
        profile(written(tmp_path / "list.json", [1, 2]))


def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1\nb: 2\n")

    with pytest.raises(ConfigurationError, match=r"broken\.yaml is not valid YAML") as caught:
        profile(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a100", "", "profiles"])
def test_an_unknown_name_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigurationError, match="a10-llama-7b, a10x4-llama-30b, rtx4090"):
        profile(name)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no/such\.yaml cannot be read: No such file"):
        profile("no/such.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture.yaml"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigurationError, match=r"picture\.yaml cannot be read: it is not UTF-8"):
        profile(str(path))
