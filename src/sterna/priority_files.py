"""Files of priority classes and of API keys: YAML or JSON lists.

Classes (`--priority-classes`):

    - {name: high, rank: 1, target_load: 1600}              # execution_rank: 1, as the rank
    - {name: normal, rank: 0}
    - {name: batch, rank: -1}

Keys (`--api-keys`):

    - {name: shop, key: sk-..., highest_class: high}
    - {name: nightly, key_sha256: 9f86d081..., highest_class: batch}
    - {name: operators, key: sk-..., admin: true}
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from sterna.errors import ConfigurationError
from sterna.priority_classes import ApiKey, PriorityClass, PriorityClasses
from sterna.types import Priority

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


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The file of `--api-keys`, which may change while a server runs.

    Attributes:
        path: absolute, since processes have working directories of their own.
        classes: those that its rows may name.
        others: the keys that hold besides those of the file: of `--api-key`.
    """

    path: Path
    classes: PriorityClasses
    others: tuple[ApiKey, ...] = ()

    def read(self) -> tuple[ApiKey, ...]:
        """Return all keys.

        Raises:
            ConfigurationError: as `read_api_keys`.
        """
        return (*self.others, *read_api_keys(self.path, self.classes))

    def state(self) -> tuple[int, ...]:
        """Return values that differ once the file has other content, or the path leads to another
        file; none where it leads to no file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


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
            message contains a key.
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
        raise ConfigurationError(f"{option}: the file has no key, so no client could be admitted")
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
        # Half of a surrogate pair, which YAML can spell, is in no header.
        digest = hashlib.sha256(row.key.encode(errors="surrogatepass")).digest()
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


def _read_rows(option: str, path: Path, row: type[Row]) -> list[Row]:
    try:
        # JSON is YAML.
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{option} cannot be read: {reason}") from error
    except Exception as error:
        # YAML's own message quotes the line, which may contain a key. Values that are not what
        # their tags say raise all kinds of errors, such as KeyError.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise ConfigurationError(f"{option} is neither YAML nor JSON{where}") from None
    try:
        return msgspec.convert(content, list[row])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{option}: {error}") from error
