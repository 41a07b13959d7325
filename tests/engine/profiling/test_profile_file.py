"""Saved profiles are found by exactly the engine that they are of, and by no other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sterna.engine.emulated.profiles import A10_LLAMA_7B, profile
from sterna.engine.profiling.fitting import PrefillPoint
from sterna.engine.profiling.measurement_plan import Batch, Decode
from sterna.engine.profiling.profile_file import (
    FORMAT,
    FitError,
    Measurement,
    document,
    find,
    nearest_difference,
    path_of,
    read,
    write,
)
from sterna.errors import ConfigurationError

KEY = {"model": "small (config.json 0123)", "dtype": "bfloat16", "hardware": "a laptop"}

MEASUREMENT = Measurement(
    format=FORMAT,
    date="2026-11-21T20:14:37+00:00",
    key=KEY,
    total_tokens=11_616,
    target_load_tokens=1162,
    target_load_by_round_tokens=(1151, 1173, 1160),
    is_reached=True,
    is_noisy=False,
    request_tokens=256,
    tolerance=0.1,
    ideal_step_s=0.0327,
    limit_step_s=0.036,
    basis="measured",
    target_load_by_request_tokens={64: 350, 1024: 1383},
    prefill_fit_error=FitError(0.03, 0.1),
    decode_fit_error=FitError(0.15, 0.3),
    decodes=(Decode(Batch(4, 256), 1028.5, (0.0346, 0.035, 0.0345)),),
    prefills=(PrefillPoint(512, 0.75), PrefillPoint(512, 1.0, 512)),
)


def saved(folder: Path, measurement: Measurement = MEASUREMENT) -> Path:
    path = path_of(folder, measurement.key)
    write(path, document(A10_LLAMA_7B, measurement))
    return path


def test_what_was_saved_is_found_whole(tmp_path: Path) -> None:
    saved(tmp_path)
    assert find(tmp_path, dict(reversed(KEY.items()))) == MEASUREMENT


def test_where_nothing_was_saved_nothing_is_found(tmp_path: Path) -> None:
    assert find(tmp_path, KEY) is None
    assert nearest_difference(tmp_path, KEY) is None


def test_the_profile_of_other_hardware_is_not_taken_and_the_difference_is_told(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    saved(tmp_path, replace(MEASUREMENT, key={**KEY, "hardware": "another", "dtype": "float32"}))
    here = {**KEY, "hardware": "a server"}

    assert find(tmp_path, here) is None
    assert nearest_difference(tmp_path, here) == "hardware a laptop instead of a server"


def test_another_model_has_no_difference_to_tell(tmp_path: Path) -> None:
    saved(tmp_path)
    assert nearest_difference(tmp_path, {**KEY, "model": "large"}) is None


def test_a_file_that_was_moved_to_another_engine_is_refused(tmp_path: Path) -> None:
    here = {**KEY, "hardware": "a server"}
    saved(tmp_path).rename(path_of(tmp_path, here))

    with pytest.raises(ConfigurationError, match=r"of another engine \(hardware a laptop instead"):
        find(tmp_path, here)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be used: "),
        ("[]", "it is no JSON object"),
        ("{}", "it has no measurement"),
        ('{"measurement": {"format": 99}}', "format 99, not 1"),
        ('{"measurement": 3}', "format None, not 1"),
        ('{"measurement": {"format": 1}}', "missing required field `date`"),
    ],
)
def test_a_broken_file_is_named_with_what_to_do(text: str, reason: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(text)

    with pytest.raises(ConfigurationError) as refused:
        find(tmp_path, KEY)
    message = str(refused.value)
    assert str(path) in message
    assert reason in message
    assert message.endswith("remove it or run `sterna profile` again")
    assert "\n" not in message


@pytest.mark.parametrize("tokens", [0, -5, "many", 1.5])
def test_a_target_load_that_is_none_is_refused(tokens: object, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["measurement"]["target_load_tokens"] = tokens
    path.write_text(json.dumps(content))

    with pytest.raises(ConfigurationError, match="cannot be used"):
        find(tmp_path, KEY)


def test_the_same_file_is_a_profile_of_the_emulated_engine(tmp_path: Path) -> None:
    assert profile(str(saved(tmp_path))) == A10_LLAMA_7B


def test_a_profile_without_a_measurement_says_nothing_of_a_target_load(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    del content["measurement"]
    path.write_text(json.dumps(content))

    assert read(path) is None


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_ways_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "profiles").write_text("a file in the way")

    with pytest.raises(ConfigurationError, match=r"--output names another file.*STERNA_CACHE"):
        saved(tmp_path)
