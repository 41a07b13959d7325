"""Trace files are read exactly; each mistake in one is answered with its line."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.workload.formats import parse_csv, parse_jsonl
from sterna.workload.rows import Rows

HEADER = "arrival_s,input_tokens,output_tokens"


def read_csv(*lines: str) -> Rows:
    return parse_csv([f"{line}\n" for line in lines], "f.csv")


def read_jsonl(*records: object) -> Rows:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    return parse_jsonl([f"{line}\n" for line in lines], "f.jsonl")


def refusal_of_csv(*lines: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        read_csv(*lines)
    return str(error.value)


def refusal_of_jsonl(*records: object) -> str:
    with pytest.raises(ConfigurationError) as error:
        read_jsonl(*records)
    return str(error.value)


def values(rows: Rows) -> dict[str, object]:
    """All that is there, comparable."""
    return {
        "input": rows.input_tokens.tolist(),
        "output": rows.output_tokens.tolist(),
        "arrival_s": None if rows.arrival_s is None else rows.arrival_s.tolist(),
        "priority": None if rows.priority is None else rows.priority.tolist(),
        "prefix": None
        if rows.prefix_blocks is None
        else [rows.prefix_blocks.of(row).tolist() for row in range(len(rows))],
    }


# ---------------------------------------------------------------- what is read


def test_lengths_are_enough() -> None:
    assert values(read_csv("input_tokens,output_tokens", "374,44", "396,109")) == {
        "input": [374, 396],
        "output": [44, 109],
        "arrival_s": None,
        "priority": None,
        "prefix": None,
    }


def test_every_column_is_read_in_any_order_and_others_are_left_alone() -> None:
    rows = read_csv(
        "note,priority,prefix_blocks,output_tokens, input_tokens ,arrival_ms",
        '"a, b",1,0-2 9,44,374,500',
        ",0,,5.0,1e1,1500.5",
    )
    assert values(rows) == {
        "input": [374, 10],
        "output": [44, 5],
        "arrival_s": [0.5, 1.5005],
        "priority": [1, 0],
        "prefix": [[0, 1, 2, 9], []],
    }


def test_json_lines_give_the_same_as_csv() -> None:
    from_csv = read_csv(
        f"{HEADER},priority,prefix_blocks", "0,374,44,1,0-2 9", "4.25,396,109,0,", ""
    )
    from_jsonl = read_jsonl(
        {"arrival_s": 0, "input_tokens": 374, "output_tokens": 44, "priority": 1}
        | {"prefix_blocks": [0, 1, 2, 9], "note": None},
        "",
        {"prefix_blocks": "", "input_tokens": 396.0, "output_tokens": 109, "arrival_s": 4.25}
        | {"priority": 0},
    )
    assert values(from_csv) == values(from_jsonl)


def test_mooncakes_own_format_is_read() -> None:
    rows = read_jsonl(
        {"timestamp": 0, "input_length": 700, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 800, "output_length": 20, "hash_ids": [0, 2]},
    )
    assert values(rows) == {
        "input": [700, 800],
        "output": [500, 20],
        "arrival_s": [0.0, 3.0],
        "priority": None,
        "prefix": [[0, 1], [0, 2]],
    }


def test_qwen_bailians_own_format_is_read_in_seconds_and_blocks_of_16_tokens() -> None:
    more = {"parent_chat_id": -1, "type": "text", "turn": 1}
    rows = read_jsonl(
        {"chat_id": 7, "timestamp": 61.114, "input_length": 20, "output_length": 5}
        | {"hash_ids": [8, 9], **more},
        {"chat_id": 8, "timestamp": 62.5, "input_length": 40, "output_length": 6}
        | {"hash_ids": [8, 9, 3], **more},
    )
    assert rows.arrival_s is not None
    assert rows.arrival_s.tolist() == [61.114, 62.5]
    assert rows.prefix_blocks is not None
    assert rows.prefix_blocks.block_tokens == 16


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 23:59:59.9994520", "2023-11-17 00:00:04.3144520"),
        ("2023-11-16 23:59:59.999452+00:00", "2023-11-17 00:00:04.314452+00:00"),
        ("2023-11-16T23:59:59.999452Z", "2023-11-17T00:00:04.314452Z"),
    ],
)
def test_azures_own_format_is_read(first: str, second: str) -> None:
    rows = read_csv("TIMESTAMP,ContextTokens,GeneratedTokens", f"{first},374,44", f"{second},3,4")
    assert rows.arrival_s is not None
    assert rows.arrival_s[1] - rows.arrival_s[0] == pytest.approx(4.315, abs=1e-6)
    assert rows.input_tokens.tolist() == [374, 3]
    assert rows.output_tokens.tolist() == [44, 4]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e9), st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 9)
        ),
        min_size=1,
        max_size=20,
    ).map(sorted)
)
def test_what_is_written_is_read(rows: list[tuple[float, int, int, int]]) -> None:
    names = ("arrival_s", "input_tokens", "output_tokens", "priority")
    as_csv = read_csv(",".join(names), *[",".join(map(repr, row)) for row in rows])
    as_jsonl = read_jsonl(*[dict(zip(names, row, strict=True)) for row in rows])
    for read in (as_csv, as_jsonl):
        assert read.arrival_s is not None
        assert read.priority is not None
        columns = (read.arrival_s, read.input_tokens, read.output_tokens, read.priority)
        assert [column.tolist() for column in columns] == [list(c) for c in zip(*rows, strict=True)]
        assert [column.dtype for column in columns] == [np.float64, *[np.int64] * 3]


# ---------------------------------------------------------------- what is refused, with its line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,x,5", "input_tokens must be a whole number from 1 on, not 'x'"),
        ("1,,5", "input_tokens must be a whole number from 1 on, not ''"),
        ("1,-4,5", "input_tokens must be a whole number from 1 on, not '-4'"),
        ("1,0,5", "input_tokens must be a whole number from 1 on, not '0'"),
        ("1,nan,5", "input_tokens must be a whole number from 1 on, not 'nan'"),
        ("1,inf,5", "input_tokens must be a whole number from 1 on, not 'inf'"),
        ("1,1.5,5", "input_tokens must be a whole number from 1 on, not '1.5'"),
        ("1,1_0,5", "input_tokens must be a whole number from 1 on, not '1_0'"),
        ("1,1e99,5", "input_tokens must be a whole number from 1 on, not '1e99'"),
        ("1,4,0", "output_tokens must be a whole number from 1 on, not '0'"),
        ("x,4,5", "arrival_s must be a number of seconds, at least 0, not 'x'"),
        ("NaN,4,5", "arrival_s must be a number of seconds, at least 0, not 'NaN'"),
        ("inf,4,5", "arrival_s must be a number of seconds, at least 0, not 'inf'"),
        ("-1,4,5", "arrival_s must be a number of seconds, at least 0, not '-1'"),
        ("0.4,4,5", "arrival_s is earlier than on the line before; sort the file by it"),
        ("1,4", "2 values for the 3 columns of the header"),
        ("1,4,5,6", "4 values for the 3 columns of the header"),
        ('1,"4"4,5', "not CSV: ',' expected after '\"'"),
    ],
)
def test_a_wrong_line_of_csv_is_named(line: str, message: str) -> None:
    refusal = refusal_of_csv(HEADER, "0.0,1,1", "0.5,1,1", "", line, "9,1,1")
    assert refusal == f"f.csv, line 5: {message}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("priority", "-1", "priority must be {priority}, not '-1'"),
        ("priority", "high", "priority must be {priority}, not 'high'"),
        ("priority", "0.5", "priority must be {priority}, not '0.5'"),
        ("priority", "1001", "priority must be {priority}, not '1001'"),
        ("prefix_blocks", "3-1", "prefix_blocks must be {blocks}, not '3-1'"),
        ("prefix_blocks", "a", "prefix_blocks must be {blocks}, not 'a'"),
        ("prefix_blocks", "1-", "prefix_blocks must be {blocks}, not '1-'"),
        ("prefix_blocks", "-1", "prefix_blocks must be {blocks}, not '-1'"),
        ("prefix_blocks", "0-1000000", "prefix_blocks must be {blocks}, not '0-1000000'"),
    ],
)
def test_a_wrong_optional_value_is_named(field: str, value: str, message: str) -> None:
    refusal = refusal_of_csv(f"input_tokens,output_tokens,{field}", "1,1,0", f"1,1,{value}")
    blocks = "whole numbers and runs A-B, separated by spaces"
    priority = "a whole number from 0 (normal) to 1,000"
    assert refusal == f"f.csv, line 3: {message.format(blocks=blocks, priority=priority)}"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"input_tokens": 1', "not JSON: "),
        ('{"input_tokens": NaN, "output_tokens": 1, "arrival_s": 1}', "not JSON: "),
        ("[1, 2]", 'not a JSON object, as in {"input_tokens": 8, ...}'),
        (
            {"input_tokens": 1, "arrival_s": 1},
            "line 1 has 'output_tokens', line 3 has not; all must",
        ),
        (
            {"input_tokens": 1, "output_tokens": 1, "arrival_s": 1, "priority": 1},
            "line 3 has 'priority', line 1 has not; all must",
        ),
        (
            {"input_tokens": True, "output_tokens": 1, "arrival_s": 1},
            "input_tokens must be a whole number from 1 on, not True",
        ),
        (
            {"input_tokens": 1, "output_tokens": None, "arrival_s": 1},
            "output_tokens must be a whole number from 1 on, not None",
        ),
        (
            {"input_tokens": 1, "output_tokens": 10**400, "arrival_s": 1},
            "output_tokens must be a whole number from 1 on, not 1000",
        ),
        (
            {"input_tokens": [1], "output_tokens": 1, "arrival_s": 1},
            "input_tokens must be a whole number from 1 on, not [1]",
        ),
        (
            {"input_tokens": 1, "output_tokens": 1, "arrival_s": False},
            "arrival_s must be a number of seconds, at least 0, not False",
        ),
        (
            {"input_tokens": 1, "output_tokens": 1, "arrival_s": 0.5},
            "arrival_s is earlier than on the line before; sort the file by it",
        ),
    ],
)
def test_a_wrong_line_of_json_is_named(record: object, message: str) -> None:
    right = {"input_tokens": 1, "output_tokens": 1, "arrival_s": 1}
    assert refusal_of_jsonl(right, "", record, right).startswith(f"f.jsonl, line 3: {message}")


@pytest.mark.parametrize("column", ["turn", "timestamp"])
def test_columns_of_other_formats_are_ignored_on_any_line(column: str) -> None:
    plain = {"input_tokens": 1, "output_tokens": 2}
    assert read_jsonl(plain, plain | {column: 3}, plain).input_tokens.tolist() == [1, 1, 1]
    # But a line of another format is none of this one.
    refusal = refusal_of_jsonl(plain, plain | {"input_length": 3})
    assert "line 2 has 'input_length', line 1 has not" in refusal


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "arrival_s,input_tokens",
            "no column 'output_tokens'; there are: arrival_s, input_tokens",
        ),
        ("a;b;input_tokens", "no column 'input_tokens'; there are: a;b;input_tokens"),
        ("12,34", "no column 'input_tokens'; there are: 12, 34"),
        ("input_tokens,output_tokens,input_tokens", "two columns are called 'input_tokens'"),
        (
            "arrival_s,arrival_ms,input_tokens,output_tokens",
            "there are 'arrival_s' and 'arrival_ms'; keep one of them",
        ),
        ("TIMESTAMP,ContextTokens", "no column 'GeneratedTokens'; there are: ContextTokens, "),
    ],
)
def test_a_wrong_header_is_named(header: str, message: str) -> None:
    assert refusal_of_csv("", header, "1,2,3").startswith(f"f.csv, line 2: {message}")


def test_a_json_line_without_a_needed_column_is_named() -> None:
    refusal = refusal_of_jsonl({"input_tokens": 3, "x": 1})
    assert refusal == "f.jsonl, line 1: no column 'output_tokens'; there are: input_tokens, x"


@pytest.mark.parametrize("date", ["", "now", "today", "2023-11-16", "2023-13-01 00:00:00", "1.5"])
def test_a_wrong_date_is_named(date: str) -> None:
    refusal = refusal_of_csv("TIMESTAMP,ContextTokens,GeneratedTokens", f"{date},3,4")
    assert refusal == (
        f"f.csv, line 2: TIMESTAMP must be a date, as in 2023-11-16 18:15:46.680590, not {date!r}"
    )


def test_an_empty_file_is_refused() -> None:
    assert refusal_of_csv() == "f.csv is empty; its first line must name the columns"
    assert refusal_of_csv("", " ") == "f.csv is empty; its first line must name the columns"
    assert refusal_of_csv(HEADER) == "f.csv has no requests, only the names of its columns"
    assert refusal_of_jsonl() == "f.jsonl is empty; each line must be a JSON object"


@given(st.lists(st.text("0123456789.,-x\"' \t{}[]:einputoks_", max_size=30), max_size=6))
def test_any_text_is_read_or_refused(lines: list[str]) -> None:
    for read in (read_csv, read_jsonl):
        for first in ([], ["input_tokens,output_tokens"], ['{"input_tokens":1,"output_tokens":2}']):
            try:
                outcome = f"f.: {len(read(*first, *lines))} requests"
            except ConfigurationError as error:
                outcome = str(error)
            assert outcome.startswith("f.")
            assert outcome != "f.: 0 requests"
