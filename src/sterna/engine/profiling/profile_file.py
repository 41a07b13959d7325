"""Files of `sterna profile`: their paths, how they are written, and how they are found.

    <cache>/profiles/<model>-<digest of the key>.json

A file is a profile of the emulated engine (`engine/emulated/profiles.py`) with one more section,
`measurement`: the key of the engine, the target load, and every point that was timed. The whole key
is compared when a file is found, so that the file of another engine is never used.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sterna.engine.emulated.profiles import MEASUREMENT, Profile
from sterna.engine.profiling.fitting import PrefillPoint
from sterna.engine.profiling.measurement_plan import Decode
from sterna.errors import ConfigurationError

FORMAT = 1
"""Version of the measurement's format; a file of another one cannot be read."""

Key = Mapping[str, str]
"""Key of the engine that a profile is valid for: model, options and hardware, by name."""


@dataclass(frozen=True, slots=True)
class FitError:
    """Distance of the fitted step times from the points, as fractions of these."""

    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement and its results; all times in seconds.

    Attributes:
        format: see `FORMAT`.
        date: its time, in UTC.
        key: the engine that it is valid for.
        total_tokens: M of the engine that was measured.
        target_load_tokens: the proposal.
        target_load_by_round_tokens: the target load of each round alone.
        is_reached: whether the step of the largest batch was over the limit.
        is_noisy: whether the rounds contradict the proposal.
        request_tokens: tokens of each request in the reference batch.
        tolerance: largest excess of a step over the ideal one, as a fraction.
        ideal_step_s: the step of one request alone.
        limit_step_s: the longest step within the tolerance.
        basis: "measured" or "fitted"; see `Basis`.
        target_load_by_request_tokens: the target load of requests of other lengths.
        prefill_fit_error: error of the profile's prefill times.
        decode_fit_error: error of its decode times.
    """

    format: int
    date: str
    key: dict[str, str]
    total_tokens: int
    target_load_tokens: int
    target_load_by_round_tokens: tuple[int, ...]
    is_reached: bool
    is_noisy: bool
    request_tokens: int
    tolerance: float
    ideal_step_s: float
    limit_step_s: float
    basis: str
    target_load_by_request_tokens: dict[int, int]
    prefill_fit_error: FitError
    decode_fit_error: FitError
    decodes: tuple[Decode, ...]
    prefills: tuple[PrefillPoint, ...]

    def __post_init__(self) -> None:
        if self.target_load_tokens < 1:
            # msgspec turns it into a validation error that names the place.
            raise ValueError(f"target_load_tokens is {self.target_load_tokens}: must be positive")


def document(profile: Profile, measurement: Measurement) -> dict[str, Any]:
    """The content of a file."""
    found: dict[str, Any] = msgspec.to_builtins(profile, str_keys=True)
    return {**found, MEASUREMENT: msgspec.to_builtins(measurement, str_keys=True)}


def path_of(cache_folder: Path, key: Key) -> Path:
    """The path of the profile with this key."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return cache_folder / "profiles" / f"{_stem(key)}-{digest[:12]}.json"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the document; an earlier file is replaced whole or not at all.

    Raises:
        ConfigurationError: it cannot be written there.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"the profile cannot be written to {path}: {error.strerror or error}; --output names "
            "another file, the environment variable STERNA_CACHE another cache folder"
        ) from error


def read(path: Path) -> Measurement | None:
    """The measurement in a profile's file; None if there is no such file, or no measurement in it.

    Raises:
        ConfigurationError: the file is broken or of another version of Sterna.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _broken(path, error) from None
    if not isinstance(content, dict):
        raise _broken(path, "it is no JSON object")
    measurement = content.get(MEASUREMENT)
    if measurement is None:
        return None
    number = measurement.get("format") if isinstance(measurement, dict) else None
    if number != FORMAT:
        raise _broken(path, f"its measurement has format {number!r}, not {FORMAT}")
    try:
        # JSON has text keys only.
        return msgspec.convert(measurement, Measurement, str_keys=True)
    except msgspec.ValidationError as error:
        raise _broken(path, error) from None


def find(cache_folder: Path, key: Key) -> Measurement | None:
    """The saved measurement of exactly this engine; None if there is none.

    Raises:
        ConfigurationError: its file is broken, or holds the measurement of another engine.
    """
    path = path_of(cache_folder, key)
    found = read(path)
    if found is None:
        if path.exists():
            raise _broken(path, f"it has no {MEASUREMENT}")
        return None
    if found.key != dict(key):
        raise _broken(path, f"it is of another engine ({difference(found.key, key)})")
    return found


def nearest_difference(cache_folder: Path, key: Key) -> str | None:
    """The difference between this engine and the nearest saved profile of the same model, in words;
    None if the model has no profile that can be read."""
    differences = []
    for path in sorted((cache_folder / "profiles").glob(f"{_stem(key)}-*.json")):
        try:
            found = read(path)
        except ConfigurationError:
            continue
        if found is not None:
            differences.append(difference(found.key, key))
    return min(differences, key=lambda text: text.count("; "), default=None)


def difference(saved: Key, wanted: Key) -> str:
    """The parts in which the keys differ, with both values."""
    return "; ".join(
        f"{name} {saved.get(name)} instead of {wanted.get(name)}"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    )


def _stem(key: Key) -> str:
    name = key.get("model", "").split(" ")[0].split("@")[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "model"


def _broken(path: Path, reason: object) -> ConfigurationError:
    return ConfigurationError(
        f"the saved profile {path} cannot be used: {' '.join(str(reason).split())}; remove it or "
        "run `sterna profile` again"
    )


def cpu_model() -> str:
    """The name of the processor, or its kind; "" if neither is known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
