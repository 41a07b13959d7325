"""Turns of sessions follow answers, and have all earlier turns in their prompts."""

import numpy as np
import pytest

from sterna.errors import ConfigurationError
from sterna.workload.block_hashes import BlockHashes
from sterna.workload.catalog import Workload, build_trace
from sterna.workload.formats import parse_csv
from sterna.workload.rows import Rows
from sterna.workload.turns import NONE, Turns

HEADER = "session,turn,delay_ms,new_input_tokens,output_tokens,new_prefix_blocks\n"
SESSIONS = (
    HEADER,
    "4,0,0,1000,100,0-1\n",
    "4,1,2500,500,30,7-8\n",
    "4,2,0,40,8,\n",
    "9,0,0,600,20,0 5\n",
    "9,1,100,405,300,6\n",
)


def read(*lines: str) -> Rows:
    return parse_csv(lines or SESSIONS, "sessions.csv")


def refusal(*lines: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        read(HEADER, *lines)
    return str(error.value)


def turns(*previous: int, think_s: float = 1.0) -> Turns:
    return Turns(np.array(previous), np.where(np.array(previous) == NONE, 0.0, think_s))


def blocks_of(rows: Rows) -> list[list[int]]:
    assert rows.prefix_blocks is not None
    return [rows.prefix_blocks.of(row).tolist() for row in range(len(rows))]


def turns_of(rows: Rows) -> Turns:
    assert rows.turns is not None
    return rows.turns


# -------------------------------------------------------------------------------- files


def test_a_prompt_has_the_prompts_and_answers_before_it() -> None:
    rows = read()
    assert rows.input_tokens.tolist() == [1000, 1600, 1670, 600, 1025]
    assert rows.output_tokens.tolist() == [100, 30, 8, 20, 300]
    assert turns_of(rows).previous.tolist() == [NONE, 0, 1, NONE, 3]
    assert turns_of(rows).think_s.tolist() == [0.0, 2.5, 0.0, 0.0, 0.1]


def test_the_blocks_of_an_answer_are_known_where_its_session_goes_on() -> None:
    """1,100 tokens reach into the third block of 512, which the next turn names."""
    rows = read()
    assert blocks_of(rows) == [[0, 1, 7], [0, 1, 7, 8], [0, 1, 7, 8], [0, 5], [0, 5, 6]]
    assert rows.prefix_blocks is not None
    assert rows.prefix_blocks.num_tokens is not None
    assert rows.prefix_blocks.num_tokens.tolist() == [1100, 1630, 1670, 620, 1025]


def test_blocks_may_be_unknown() -> None:
    header = HEADER.replace(",new_prefix_blocks", "")
    assert read(header, "1,0,0,8,2\n", "1,1,5,8,2\n").prefix_blocks is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1,1,0,5,5,\n"], "line 2: turn 1 of session 1, where its turn 0 must be"),
        (["1,0,0,5,5,\n", "1,2,0,5,5,\n"], "line 3: turn 2 of session 1, where its turn 1 must"),
        (
            ["1,0,0,5,5,\n", "2,0,0,5,5,\n", "1,0,0,5,5,\n"],
            "line 4: session 1 has ended further up",
        ),
        (["1,0,-1,5,5,\n"], "line 2: delay_ms must be a number of milliseconds"),
    ],
)
def test_what_is_no_session_is_refused_with_its_line(lines: list[str], message: str) -> None:
    assert message in refusal(*lines)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no column 'turn'"):
        read("session,delay_ms,new_input_tokens,output_tokens\n", "1,0,5,5\n")


# ---------------------------------------------------------------------------------- rows


def test_a_session_ends_before_a_turn_that_is_too_long() -> None:
    rows = read().no_longer_than(1635)
    assert rows.input_tokens.tolist() == [1000, 1600, 600, 1025]
    assert turns_of(rows).previous.tolist() == [NONE, 0, NONE, 2]


def test_repeated_sessions_are_others() -> None:
    rows = read().repeated_to(8)
    assert turns_of(rows).previous.tolist() == [NONE, 0, 1, NONE, 3, NONE, 5, 6]
    assert not set(blocks_of(rows)[5]) & set(blocks_of(rows)[0])


def test_divided_sessions_go_on_where_they_went_on() -> None:
    """Each turn adds a token at least."""
    rows = read().divided(64)
    assert rows.output_tokens.tolist() == [1, 1, 1, 1, 4]
    assert rows.input_tokens.tolist() == [15, 15 + 1 + 7, 23 + 1 + 1, 9, 9 + 1 + 6]
    assert rows.prefix_blocks is not None
    assert rows.prefix_blocks.block_tokens == 8
    assert rows.prefix_blocks.num_tokens is not None
    assert rows.prefix_blocks.num_tokens.tolist() == [16, 24, 25, 10, 16]


def test_prefix_blocks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="512 tokens of a prefix block, not by 3"):
        read().divided(3)


# --------------------------------------------------------------------------------- traces


def test_a_turn_finds_what_the_turn_before_it_computed() -> None:
    """Prompt and answer; sessions share the first block."""
    rows = read()
    trace = build_trace(Workload("agentic-code", num_requests=5, rate=1.0))
    trace = type(trace)(
        "sessions",
        np.zeros(5),
        rows.input_tokens,
        rows.output_tokens,
        np.zeros(5, np.int64),
        rows.prefix_blocks,
        rows.turns,
    )
    hashes = BlockHashes.of(trace, 16)
    # 1,100 and 1,630 tokens, then 512 that both sessions have, then 620; in blocks of 16.
    assert hashes.reusable_tokens.tolist() == [0, 1088, 1616, 512, 608]


def test_arrivals_are_those_of_sessions() -> None:
    trace = build_trace(Workload("agentic-code", rate=2.0, divisor=16))
    assert trace.turns is not None
    first = trace.turns.first()
    assert (trace.arrival_s == trace.arrival_s[first]).all()
    sessions = trace.arrival_s[trace.turns.is_first]
    assert len(sessions) == 200
    assert 60.0 < sessions[-1] < 140.0
    assert trace.prefix_blocks is not None
    assert trace.prefix_blocks.block_tokens == 32


def test_think_times_are_divided_and_nothing_else() -> None:
    whole = build_trace(Workload("agents", 200, rate=2.0))
    trace = build_trace(Workload("agents", 200, rate=2.0, think_divisor=8.0))
    assert whole.turns is not None
    assert trace.turns is not None
    assert whole.turns.think_s.sum() > 0
    assert trace.turns.think_s == pytest.approx(whole.turns.think_s / 8)
    assert (trace.turns.previous == whole.turns.previous).all()
    assert (trace.arrival_s == whole.arrival_s).all()
    assert (trace.output_tokens == whole.output_tokens).all()


def test_a_trace_without_sessions_has_no_think_times_to_divide() -> None:
    with pytest.raises(ConfigurationError, match="M-M has no sessions"):
        build_trace(Workload("M-M", rate=1.0, think_divisor=2.0))
    with pytest.raises(ConfigurationError, match="think_divisor must be positive, not 0"):
        Workload("agents", think_divisor=0.0)


def test_drawn_lengths_are_not_divided() -> None:
    with pytest.raises(ConfigurationError, match="choose smaller means"):
        build_trace(Workload("M-M", rate=1.0, divisor=2))


# ---------------------------------------------------------------------------------- turns


def test_turns_know_who_follows_and_where_a_session_began() -> None:
    found = turns(NONE, NONE, 0, 2, 1)
    assert found.next().tolist() == [2, 4, 3, NONE, NONE]
    assert found.first().tolist() == [0, 1, 0, 0, 1]
    assert found.is_first.tolist() == [True, True, False, False, False]


def test_taken_turns_follow_what_was_taken_with_them() -> None:
    found = turns(NONE, 0, 1).take(np.array([0, 1, 2, 0, 1, 2]))
    assert found.previous.tolist() == [NONE, 0, 1, NONE, 3, 4]
    part = turns(NONE, 0, 1).take(np.array([1, 2]))
    assert part.previous.tolist() == [NONE, 0]
    assert part.think_s.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("previous", "think_s", "message"),
    [
        ([0], [0.0], "each must follow an earlier request"),
        ([NONE, -2], [0.0, 0.0], "each must follow an earlier request"),
        ([NONE, 0, 0], [0.0, 1.0, 1.0], "two follow the same request"),
        ([NONE, 0], [0.0, -1.0], "think times"),
        ([NONE, 0], [0.0, np.inf], "think times"),
        ([NONE, 0], [0.0], "as many think times as requests"),
    ],
)
def test_turns_that_do_not_fit_together_are_refused(
    previous: list[int], think_s: list[float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Turns(np.array(previous), np.array(think_s))
