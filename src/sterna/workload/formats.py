"""Formats of trace files: CSV and JSON Lines, line by line. Pure.

Each has columns for the lengths of input and output, and may have one for the arrival:

    columns                                                            format
    input_tokens, output_tokens, arrival_s or arrival_ms, priority,    Sterna's
        prefix_blocks (ids and runs A-B, separated by spaces)
    input_length, output_length, timestamp (in ms), hash_ids           Mooncake's
    the same with chat_id; timestamp in s, hash_ids of 16 tokens       Qwen-Bailian's
    ContextTokens, GeneratedTokens, TIMESTAMP (a date)                 Azure's
    new_input_tokens, output_tokens, session, turn, delay_ms,          sessions
        new_prefix_blocks

Other columns are ignored. Every error message names the file and, if one is wrong, its line.
"""

import csv
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sterna.errors import ConfigurationError
from sterna.workload.prefix import MOONCAKE_BLOCK_TOKENS, PrefixBlocks
from sterna.workload.rows import Rows
from sterna.workload.trace import MAX_PRIORITY
from sterna.workload.turns import SessionTurns

MAX_WHOLE = 10**9
"""A larger number of tokens is a mistake in the file; it also keeps sums within int64."""

BAILIAN_BLOCK_TOKENS = 16

_Record = tuple[int, Mapping[str, object]]
"""The number of a line, and its values by column."""


def parse_csv(lines: Iterable[str], name: str) -> Rows:
    """The requests of a CSV file with a header line.

    Raises:
        ConfigurationError: a column is missing, or a value is invalid.
    """
    return _parse(_csv_records(lines, name), name)


def parse_jsonl(lines: Iterable[str], name: str) -> Rows:
    """The requests of a file with one JSON object a line.

    Raises:
        ConfigurationError: a line is not an object with the columns of the first, or a value is
            invalid.
    """
    return _parse(_jsonl_records(lines, name), name)


def _csv_records(lines: Iterable[str], name: str) -> Iterator[_Record]:
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if len(cells) < 2 and not "".join(cells).strip():
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                repeated = [column for column in header if header.count(column) > 1]
                if repeated:
                    raise _error(name, reader.line_num, f"two columns are called {repeated[0]!r}")
                _format_of(header, name, reader.line_num)
                continue
            if len(cells) != len(header):
                raise _error(
                    name,
                    reader.line_num,
                    f"{len(cells)} values for the {len(header)} columns of the header",
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise _error(name, reader.line_num, f"not CSV: {error}") from error
    if header is None:
        raise ConfigurationError(f"{name} is empty; its first line must name the columns")


def _jsonl_records(lines: Iterable[str], name: str) -> Iterator[_Record]:
    first_line, known, read = 0, set[str](), set[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise _error(name, number, f"not JSON: {error}") from error
        if not isinstance(record, dict):
            raise _error(name, number, 'not a JSON object, as in {"input_tokens": 8, ...}')
        if not first_line:
            _format_of(record.keys(), name, number)
            # Columns of other formats are ignored, but for those by which a format is known.
            read = {column.name for column in _nearest_format(record.keys())} | _LENGTHS
            first_line, known = number, read & record.keys()
        keys = read & record.keys()
        for column in sorted(keys ^ known):
            with_it, without = (number, first_line) if column in keys else (first_line, number)
            raise _error(
                name, number, f"line {with_it} has {column!r}, line {without} has not; all must"
            )
        yield number, record
    if not first_line:
        raise ConfigurationError(f"{name} is empty; each line must be a JSON object")


def _parse(records: Iterator[_Record], name: str) -> Rows:
    columns: dict[str, _Column] = {}
    block_tokens = MOONCAKE_BLOCK_TOKENS
    values: dict[str, list[float]] = {}
    ids: list[int] = []
    sessions: set[float] = set()
    for line, record in records:
        if not columns:
            columns = _format_of(record.keys(), name, line)
            values = {field: [] for field in columns}
            if columns.get("arrival_s") is _BAILIANS_ARRIVAL:
                block_tokens = BAILIAN_BLOCK_TOKENS
        for field, column in columns.items():
            try:
                value = column.read(record[column.name])
            except (ValueError, OverflowError, TypeError):
                given = record[column.name]
                raise _error(
                    name, line, f"{column.name} must be {column.rule}, not {given!r}"
                ) from None
            if isinstance(value, list):
                ids += value
                value = len(ids)
            values[field].append(value)
        arrivals_s = values.get("arrival_s", [])
        if len(arrivals_s) > 1 and arrivals_s[-1] < arrivals_s[-2]:
            arrival = columns["arrival_s"].name
            raise _error(
                name, line, f"{arrival} is earlier than on the line before; sort the file by it"
            )
        if "turn" in values:
            _require_next_turn(values["session"], values["turn"], sessions, name, line)
    if not columns:
        raise ConfigurationError(f"{name} has no requests, only the names of its columns")
    output_tokens = np.array(values["output_tokens"], np.int64)
    prefix_blocks = None
    if "prefix_blocks" in values:
        end = np.array(values["prefix_blocks"], np.int64)
        prefix_blocks = PrefixBlocks(np.array(ids, np.int64), end, block_tokens)
    if "turn" in values:
        added = SessionTurns(
            np.array(values["session"], np.int64),
            np.array(values["new_input_tokens"], np.int64),
            output_tokens,
            np.array(values["think_s"], np.float64),
            prefix_blocks,
        )
        return Rows(
            added.input_tokens,
            output_tokens,
            prefix_blocks=added.prefix_blocks,
            turns=added.turns,
        )
    return Rows(
        np.array(values["input_tokens"], np.int64),
        output_tokens,
        np.array(values["arrival_s"], np.float64) if "arrival_s" in values else None,
        np.array(values["priority"], np.int64) if "priority" in values else None,
        prefix_blocks,
    )


def _require_next_turn(
    sessions: Sequence[float], turns: Sequence[float], known: set[float], name: str, line: int
) -> None:
    """Require that the last turn is the next one of its session, or the first one of a session that
    is not known yet; it is from then on."""
    is_first = len(sessions) < 2 or sessions[-1] != sessions[-2]
    expected = 0 if is_first else turns[-2] + 1
    if turns[-1] != expected:
        raise _error(
            name,
            line,
            f"turn {turns[-1]:g} of session {sessions[-1]:g}, where its turn {expected:g} must "
            "be; list the turns of a session one after the other, from 0 on",
        )
    if is_first and sessions[-1] in known:
        raise _error(name, line, f"session {sessions[-1]:g} has ended further up")
    known.add(sessions[-1])


def _error(name: str, line: int, what: str) -> ConfigurationError:
    return ConfigurationError(f"{name}, line {line}: {what}")


# ---------------------------------------------------------------------------- columns and values


def _whole(value: object, lowest: int, highest: int = MAX_WHOLE) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = _decimal(value)
    if number != math.floor(number) or not lowest <= number <= highest:
        raise ValueError
    return int(number)


def _decimal(value: object) -> float:
    # float() also reads "1_000".
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise ValueError
    if not isinstance(value, str | int | float):
        raise TypeError
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise ValueError
    return number


_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|\+00:00)?")


def _date_s(value: object) -> float:
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    since = np.datetime64(f"{match[1]}T{match[2]}", "ns") - np.datetime64("2000-01-01", "ns")
    return float(since / np.timedelta64(1, "s"))


def _blocks(value: object) -> list[int]:
    if isinstance(value, list):
        return [_whole(block, 0) for block in value]
    if not isinstance(value, str):
        raise TypeError
    ids: list[int] = []
    for word in value.split():
        first, dash, last = word.partition("-")
        start, end = _whole(first, 0), _whole(last if dash else first, 0)
        if not start <= end < start + _MAX_RUN:
            raise ValueError
        ids.extend(range(start, end + 1))
    return ids


_MAX_RUN = 1_000_000


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a file, its field in `Rows`, and the reader of its values."""

    name: str
    field: str
    read: Callable[[object], float | int | list[int]]
    rule: str


def _tokens(name: str, field: str) -> _Column:
    return _Column(name, field, lambda value: _whole(value, 1), "a whole number from 1 on")


def _whole_from_0(name: str) -> _Column:
    return _Column(name, name, lambda value: _whole(value, 0), "a whole number from 0 on")


def _milliseconds(name: str, field: str = "arrival_s") -> _Column:
    return _Column(
        name,
        field,
        lambda value: _decimal(value) / 1e3,
        "a number of milliseconds, at least 0",
    )


_SECONDS = "a number of seconds, at least 0"

_BAILIANS_ARRIVAL = _Column("timestamp", "arrival_s", _decimal, _SECONDS)
"""In place of that of Mooncake's format, with the same name, where requests have a `chat_id`."""

_FORMATS: tuple[tuple[_Column, ...], ...] = (
    (
        _tokens("input_tokens", "input_tokens"),
        _tokens("output_tokens", "output_tokens"),
        _Column("arrival_s", "arrival_s", _decimal, _SECONDS),
        _milliseconds("arrival_ms"),
        _Column(
            "priority",
            "priority",
            lambda value: _whole(value, 0, MAX_PRIORITY),
            f"a whole number from 0 (normal) to {MAX_PRIORITY:,}",
        ),
        _Column(
            "prefix_blocks",
            "prefix_blocks",
            _blocks,
            "whole numbers and runs A-B, separated by spaces",
        ),
    ),
    (
        _tokens("input_length", "input_tokens"),
        _tokens("output_length", "output_tokens"),
        _milliseconds("timestamp"),
        _Column("hash_ids", "prefix_blocks", _blocks, "a list of whole numbers from 0 on"),
    ),
    (
        _tokens("ContextTokens", "input_tokens"),
        _tokens("GeneratedTokens", "output_tokens"),
        _Column("TIMESTAMP", "arrival_s", _date_s, "a date, as in 2023-11-16 18:15:46.680590"),
    ),
    (
        _tokens("new_input_tokens", "new_input_tokens"),
        _tokens("output_tokens", "output_tokens"),
        _whole_from_0("session"),
        _whole_from_0("turn"),
        _milliseconds("delay_ms", "think_s"),
        _Column(
            "new_prefix_blocks",
            "prefix_blocks",
            _blocks,
            "whole numbers and runs A-B, separated by spaces",
        ),
    ),
)

_SESSIONS = _FORMATS[-1]

_LENGTHS = {column.name for columns in _FORMATS for column in columns[:2]}


def _nearest_format(names: Collection[str]) -> tuple[_Column, ...]:
    """The first format of which the file has a length, that of the input before that of the
    output."""
    for place in (0, 1):
        for columns in _FORMATS:
            if columns[place].name in names:
                return columns
    return _FORMATS[0]


def _format_of(names: Collection[str], name: str, line: int) -> dict[str, _Column]:
    """The columns to read, by field."""
    columns = _nearest_format(names)
    for column in columns if columns is _SESSIONS else columns[:2]:
        if column.name == "new_prefix_blocks":
            continue
        if column.name not in names:
            listed = ", ".join(sorted(names))
            raise _error(name, line, f"no column {column.name!r}; there are: {listed}")
    found: dict[str, _Column] = {}
    for column in columns:
        if column.name in names and column.field in found:
            both = f"{found[column.field].name!r} and {column.name!r}"
            raise _error(name, line, f"there are {both}; keep one of them")
        if column.name in names:
            found[column.field] = column
    if "chat_id" in names and "timestamp" in [each.name for each in found.values()]:
        found["arrival_s"] = _BAILIANS_ARRIVAL
    return found
