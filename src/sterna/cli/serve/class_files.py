"""The files of `--priority-classes` and `--api-keys`: who may ask for what, and what it means.

Both are YAML or JSON lists:

    - {name: high, rank: 1, target_load: 1600}              # execution_rank: 1, as the rank
    - {name: normal, rank: 0}
    - {name: batch, rank: -1}

    - {name: shop, key: sk-..., highest_class: high}
    - {name: nightly, key_sha256: 9f86d081..., highest_class: batch}
    - {name: operators, key: sk-..., admin: true}
"""

import argparse
import hashlib
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec
import yaml

from sterna.classes import DEFAULT_CLASSES, ApiKey, PriorityClass, PriorityClasses
from sterna.config import PolicyConfig
from sterna.errors import ConfigurationError
from sterna.policy.presets import preset
from sterna.types import HIGH, Priority

SHA256_BYTES = 32


class ClassRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One class in the file; see `PriorityClass`."""

    name: str
    rank: int
    execution_rank: int | None = None
    target_load: int | None = None


class KeyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key in the file; see `ApiKey`. It has `key` or `key_sha256`, in hexadecimal digits."""

    name: str
    key: str | None = None
    key_sha256: str | None = None
    highest_class: str | None = None
    admin: bool = False


Row = TypeVar("Row")


def add_class_options(group: "argparse._ArgumentGroup") -> None:
    """Add the options that name the two files."""
    group.add_argument(
        "--priority-classes",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the classes of requests: a YAML or JSON list of {name, rank, execution_rank, "
        "target_load} (default: high, of rank 1, and normal, of rank 0)",
    )
    group.add_argument(
        "--api-keys",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="who may use the API: a YAML or JSON list of {name, key or key_sha256, "
        "highest_class, admin}; a key of --api-key may do everything",
    )


def settle_classes(args: Namespace) -> None:
    """Read both files, and choose vLLM's scheduling policy where no option does.

    Leaves `classes` and `api_key_table`, all keys with those of --api-key, in `args`.

    Raises:
        ConfigurationError: a file cannot be read, or what it says cannot work.
    """
    has_priorities = preset(args.policy).has_priorities
    if args.scheduling_policy is None:
        args.scheduling_policy = "priority" if has_priorities else "fcfs"
    classes = DEFAULT_CLASSES
    if "priority_classes" in args:
        classes = read_classes(Path(args.priority_classes))
    is_honoured = has_priorities and args.scheduling_policy == "priority"
    args.classes = replace(classes, are_honoured=is_honoured)
    keys = [_own_key(key) for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
    if "api_keys" in args:
        keys += read_api_keys(Path(args.api_keys), args.classes)
    args.api_key_table = tuple(keys)


def with_classes(policy: PolicyConfig, classes: PriorityClasses) -> PolicyConfig:
    """Return the policy with the target loads of these classes.

    A class above normal that gives no target load has the one that the policy has for high.
    """
    if not classes.are_honoured:
        return replace(policy, has_priorities=False)
    default_tokens = policy.target_load_tokens.get(HIGH)
    if default_tokens is None:
        return policy
    target_load = MappingProxyType(classes.target_load_tokens(default_tokens))
    return replace(policy, target_load_tokens=target_load)


def read_classes(path: Path) -> PriorityClasses:
    """Return the classes that a file lists.

    Raises:
        ConfigurationError: it cannot be read, or the classes contradict each other.
    """
    option = f"--priority-classes {path}"
    rows = _read_rows(option, path, ClassRow)
    try:
        return PriorityClasses(
            tuple(
                PriorityClass(
                    name=row.name,
                    scheduling_priority=Priority(row.rank),
                    execution_priority=Priority(
                        row.rank if row.execution_rank is None else row.execution_rank
                    ),
                    target_load_tokens=row.target_load,
                )
                for row in rows
            )
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def read_api_keys(path: Path, classes: PriorityClasses) -> list[ApiKey]:
    """Return the keys that a file lists.

    Raises:
        ConfigurationError: it cannot be read, two keys are the same, or a class is unknown. No
            message has a key in it.
    """
    option = f"--api-keys {path}"
    keys: list[ApiKey] = []
    for row in _read_rows(option, path, KeyRow):
        key = _key_of(option, row, classes)
        for other in keys:
            if other.digest == key.digest:
                raise ConfigurationError(f"{option}: {other.name} and {key.name} have the same key")
            if other.name == key.name:
                raise ConfigurationError(f"{option}: there are two keys named {key.name}")
        keys.append(key)
    if not keys:
        raise ConfigurationError(f"{option}: there is no key in it, and nobody could get in")
    return keys


def _key_of(option: str, row: KeyRow, classes: PriorityClasses) -> ApiKey:
    highest: PriorityClass | None = None
    if row.highest_class is not None:
        highest = classes.named(row.highest_class)
        if highest is None:
            known = ", ".join(each.name for each in classes.classes)
            raise ConfigurationError(
                f"{option}: {row.name}: there is no priority class {row.highest_class}; there "
                f"are: {known}"
            )
    if (row.key is None) == (row.key_sha256 is None) or row.key == "":
        raise ConfigurationError(f"{option}: {row.name}: give either key or key_sha256")
    if row.key is not None:
        digest = hashlib.sha256(row.key.encode()).digest()
    else:
        try:
            digest = bytes.fromhex(row.key_sha256 or "")
        except ValueError:
            digest = b""
        if len(digest) != SHA256_BYTES:
            raise ConfigurationError(
                f"{option}: {row.name}: key_sha256 must be {2 * SHA256_BYTES} hexadecimal digits, "
                "as `printf %s KEY | sha256sum` prints them"
            )
    return ApiKey(row.name, digest, highest, row.admin)


def _own_key(key: str) -> ApiKey:
    return ApiKey("--api-key", hashlib.sha256(key.encode()).digest(), is_admin=True)


def _read_rows(option: str, path: Path, row: type[Row]) -> list[Row]:
    try:
        # JSON is YAML.
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{option} cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        # YAML's own message quotes the line, which may have a key in it.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise ConfigurationError(f"{option} is neither YAML nor JSON{where}") from None
    try:
        return msgspec.convert(content, list[row])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{option}: {error}") from error
