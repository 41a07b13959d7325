"""Records of what clients see of a fault, and the table that `bench.parts` makes of them."""

from dataclasses import replace

import pytest

from bench.chaos.clients import Answer, Question
from bench.parts.report import SIDES, WITH, in_words, markdown, row_of
from bench.parts.trials import SUPERVISOR, TRIALS
from bench.parts.watching import Observation, observed, silence_s

SEEN = Observation(
    start_s=12.0,
    streams=8,
    cut=0,
    short=40,
    refused=0,
    unserved_s=0.0,
    is_served=True,
    silence_s=1.25,
    first_token_s=(0.1, 0.2),
    replaced_s=7.04,
    migrations=3,
    frontend_bytes=5 << 20,
    ended_s=None,
)
(FAULT,) = SUPERVISOR.faults
STARTS = {
    "date": "2026-11-22T00:21:22+00:00",
    "commit": "fca0",
    "rows": [
        {"way": "new process", "ready_s": {"median": 21.01}},
        {"way": "fork", "ready_s": {"median": 4.13}},
    ],
}


def answer(
    sent_s: float, times_s: list[float], *, ended_s: float | None = None, error: str | None = None
) -> Answer:
    question = Question(0, "greedy", {})
    return Answer(question, sent_s, times_s={0: times_s}, ended_s=ended_s, error=error)


def words(*seen: Observation) -> str:
    return in_words(row_of(SUPERVISOR, FAULT, WITH, seen), FAULT.shows)


def test_silence_is_the_longest_time_without_a_token_that_reaches_into_the_watch() -> None:
    assert silence_s(answer(0.0, [4.0, 4.5, 7.0], ended_s=7.0), 4.2, 10.0) == 2.5
    assert silence_s(answer(0.0, [4.0, 4.5], ended_s=4.5), 4.2, 10.0) == 0.5
    # Its next token has not come when the watch ends.
    assert silence_s(answer(0.0, [4.0, 4.5]), 4.2, 10.0) == 5.5
    # A wait for the first token.
    assert silence_s(answer(5.0, [8.0], ended_s=8.0), 4.2, 10.0) == 3.0


def test_only_what_is_open_at_the_fault_or_comes_later_counts() -> None:
    over, cut = answer(0.0, [1.0], ended_s=1.0), answer(0.0, [1.0], ended_s=3.0, error="cut")
    whole = answer(4.0, [4.5, 5.0], ended_s=5.0)
    shorts = [
        answer(1.9, [2.1], ended_s=2.1),
        answer(2.5, [], ended_s=2.6, error="refused"),
        answer(3.0, [], ended_s=3.1, error="refused"),
        answer(4.0, [4.3], ended_s=4.3),
        answer(9.9, []),
    ]
    seen = observed(
        [over, cut, whole],
        shorts,
        2.0,
        10.0,
        start_s=12.0,
        replaced_s=None,
        migrations=0,
        frontend_bytes=0,
        ended_s=None,
    )
    assert (seen.streams, seen.cut, seen.short, seen.refused) == (2, 1, 4, 2)
    assert seen.unserved_s == 1.5
    assert seen.is_served
    assert seen.first_token_s == pytest.approx((0.2, 0.3))


def test_words_tell_what_the_clients_of_a_server_saw() -> None:
    assert words(SEEN, SEEN) == (
        "0 of 16 streams cut; longest pause of a stream 1.2 s; instance replaced after 7.0 s"
    )
    assert words(SEEN, replace(SEEN, replaced_s=None)) == (
        "0 of 16 streams cut; longest pause of a stream 1.2 s; **instance replaced in 1 of 2**"
    )
    ended = replace(SEEN, cut=8, refused=4, unserved_s=3.0, is_served=False, ended_s=0.5)
    assert words(ended) == (
        "**the server ends after 0.5 s**; 8 of 8 streams cut; 4 of 40 new requests failed"
    )
    unserved = replace(SEEN, refused=30, unserved_s=9.0, is_served=False)
    assert "30 of 40 new requests failed; **no service until the end, 9 s**" in words(unserved)
    assert "served again after 9.0 s" in words(replace(unserved, is_served=True))


def test_the_table_has_a_row_for_each_fault_and_one_for_the_fork_server() -> None:
    rows = [
        row_of(trial, fault, side, [SEEN])
        for trial in TRIALS
        for fault in trial.faults
        for side in SIDES
    ]
    document = {
        "date": "2026-11-25T00:00:00+00:00",
        "commit": "abc",
        "hardware": {"cpu": "AMD EPYC", "num_cores": 2},
        "rows": rows,
    }
    table = [line for line in markdown(document, STARTS).splitlines() if line.startswith("| ")]
    assert len(table) == 2 + len(rows) / 2 + 1
    assert "after 4.1 s | it serves after 21.0 s" in table[-1]
