"""`sterna bench chaos`: what it sees of streams, what it does to processes, what comes of both."""

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos.__main__ import main
from bench.chaos.clients import SHARED_TOKENS, Answer, Differences, Question, differences, questions
from bench.chaos.faults import MARKS, Fault, Processes, cut, kill, stopped
from bench.chaos.goals import goals_of
from bench.chaos.report import BESIDE, MOVED, Move, broken_promises, markdown, rows_of, summary_of
from bench.common.pages import Goal
from sterna.types import RequestId

tokens = st.lists(st.integers(0, 3), max_size=12)


def test_equal_answers_do_not_differ() -> None:
    assert differences([1, 2, 3], [1, 2, 3]) == Differences()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([1, 2, 5, 6], Differences(lost=2)),
        ([1, 2, 3, 4], Differences(lost=2)),
        ([], Differences(lost=6)),
        ([1, 2, 3, 2, 3, 4, 5, 6], Differences(repeated=2)),
        ([1, 2, 3, 9, 9, 9], Differences(changed=3)),
    ],
)
def test_what_differs_is_lost_repeated_or_changed(found: list[int], expected: Differences) -> None:
    assert differences([1, 2, 3, 4, 5, 6], found) == expected


@given(tokens, tokens)
def test_only_equal_answers_do_not_differ(one: list[int], other: list[int]) -> None:
    assert (differences(one, other) == Differences()) == (one == other)


def answer(response_id: str, times_s: list[float], *, error: str | None = None) -> Answer:
    question = Question(0, "greedy", {"max_tokens": len(times_s)})
    return Answer(
        question,
        sent_s=times_s[0] - 0.5,
        response_id=response_id,
        tokens={0: list(range(len(times_s)))},
        times_s={0: times_s},
        error=error,
        ended_s=times_s[-1],
    )


STEADY = answer("cmpl-a", [1.0, 1.1, 1.2, 1.3, 1.4])
INTERRUPTED = answer("cmpl-b", [1.0, 1.1, 3.6, 3.7])


def test_a_gap_is_the_longest_one_that_overlaps() -> None:
    assert INTERRUPTED.gap_s(0, 1.2, 2.0) == 2.5
    assert INTERRUPTED.gap_s(0, 3.65, 3.66) == pytest.approx(0.1)
    assert INTERRUPTED.gap_s(0, 5.0, 6.0) is None


def test_rows_tell_the_gaps_of_the_streams_that_were_hit() -> None:
    faults = [
        Fault("kill-instance", "i0", 1.15, 9.0, (RequestId("cmpl-b-0-12345678"),), noticed_s=0.05),
        Fault("kill-scheduler", "scheduler", 1.05, None),
    ]
    moves = [Move(RequestId("cmpl-a-0-12345678"), 1.15, 1.25)]
    moved, beside, killed, scheduler = rows_of(faults, moves, [STEADY, INTERRUPTED], 0.02)
    assert (moved["event"], moved["n"], moved["gap_s"]["max"]) == (MOVED, 1, 0.1)
    assert (beside["event"], beside["n"], beside["gap_s"]["max"]) == (BESIDE, 1, 2.5)
    assert (killed["n"], killed["gap_s"]["max"], killed["back_s"]["median"]) == (1, 2.5, 9.0)
    assert (killed["noticed_s"]["max"], scheduler["noticed_s"]) == (0.05, None)
    assert (scheduler["n"], scheduler["gap_s"]["max"], scheduler["never_whole"]) == (2, 0.1, 1)


def test_each_choice_is_a_stream_of_its_own() -> None:
    """One of them moves, or is hit, and the other does not."""
    several = answer("cmpl-1", [1.0, 1.1, 1.2])
    several.times_s[1] = [1.0, 1.1, 1.9]
    # Its name begins as that of the others.
    another = answer("cmpl-12", [1.0, 1.1, 1.7])
    moves = [Move(RequestId("1_cmpl-1-0-12345678"), 1.15, 1.25)]
    hit = (RequestId("0_cmpl-1-0-12345678+1"), RequestId("cmpl-12-0-87654321"))
    faults = [Fault("kill-instance", "i0", 1.15, 9.0, hit)]
    moved, beside, killed = rows_of(faults, moves, [several, another], 0.02)
    assert (moved["n"], moved["gap_s"]["max"]) == (1, 0.8)
    assert (beside["n"], beside["gap_s"]["max"]) == (2, 0.6)
    assert (killed["n"], killed["gap_s"]["max"]) == (2, 0.6)


def test_the_waits_for_first_tokens_are_of_the_requests_that_a_fault_may_have_delayed() -> None:
    waited = answer("cmpl-a", [3.0, 3.1])
    waited.sent_s = 1.0
    over, later = answer("cmpl-b", [1.0, 1.1]), answer("cmpl-c", [9.0, 9.1])
    never = Answer(over.question, sent_s=1.0)
    fault = Fault("kill-scheduler", "scheduler", 1.05, 1.5)
    *_, row = rows_of([fault], [], [waited, over, later, never], 2.0)
    assert (row["waits"], row["wait_s"]["max"]) == (1, 2.0)


def test_goals_are_judged_by_the_rows_that_are_there() -> None:
    answers = [STEADY, INTERRUPTED]
    faults = [
        Fault("kill-instance", "i0", 1.15, 9.0, (RequestId("cmpl-b-0-12345678"),), noticed_s=0.05),
        Fault("stop-scheduler", "scheduler", 0.9, 9.0),
    ]
    moves = [Move(RequestId("cmpl-a-0-12345678"), 1.15, 1.25)]
    rows = rows_of(faults, moves, answers, 1.0)
    expected = {0: {0: [0, 1, 2, 3, 4]}}
    found = goals_of(rows, summary_of(rows, answers, expected))
    assert [each.is_reached for each in found] == [True] * 4
    assert [each.found for each in found] == ["2.50 s", "after 0.05 s at most", "1.00", "0.00 s"]
    others = [answer(f"cmpl-{n}", [1.0, 1.1, 1.2, 1.3]) for n in range(2)]
    late = [answer("cmpl-b", [1.0, 1.1, 4.6]), *others, answer("cmpl-a", [1.1, 1.6])]
    late[-1].sent_s = -1.0
    rows = rows_of([replace(faults[0], noticed_s=1.5), faults[1]], moves, late, 1.0)
    found = goals_of(rows, summary_of(rows, late, expected))
    assert [each.is_reached for each in found] == [False] * 4
    assert goals_of([], summary_of([], answers, expected)) == []


def test_goals_are_judged_by_the_worst_of_the_faults_that_they_are_about() -> None:
    def row(event: str, gap_s: float | None, **values: Any) -> dict[str, Any]:
        gaps_s = None if gap_s is None else {"p99": gap_s, "median": gap_s}
        seconds = {name: None if each is None else {"max": each} for name, each in values.items()}
        return {
            "event": event,
            "n": 0 if gap_s is None else 2,
            "gap_s": gaps_s,
            **{"noticed_s": None, "wait_s": None, **seconds},
        }

    rows = [
        row(MOVED, 0.15),
        row("kill-instance", 0.5, noticed_s=0.3, wait_s=7.0),
        row("stop-instance", 1.5, noticed_s=0.2),
        row("kill-driver", 5.0, wait_s=8.0),
        row("kill-scheduler", 6.0, wait_s=0.9),
        row("stop-scheduler", 6.0, wait_s=0.4),
        row("cut-scheduler", None),
    ]
    summary = {"gap_s": {"steps": {"median": 0.1}}, "wait_s": {"median": 0.1}}
    found = goals_of(rows, summary)
    assert [each.found for each in found] == ["1.50 s", "after 0.30 s at most", "1.50", "0.80 s"]
    without_streams = [row(MOVED, None), row("kill-instance", None), row("kill-scheduler", None)]
    assert goals_of(without_streams, summary) == []


def test_the_summary_counts_requests_and_tokens() -> None:
    broken = answer("cmpl-c", [1.0, 1.1], error="cut")
    wrong = answer("cmpl-d", [1.0, 1.1, 1.2, 1.3, 1.4])
    wrong.tokens[0][4] = 99
    answers = [STEADY, INTERRUPTED, broken, wrong]
    rows = rows_of(
        [Fault("kill-instance", "i0", 1.15, 9.0, (RequestId("cmpl-b-0-12345678"),))],
        [],
        answers,
        1.0,
    )
    found = summary_of(rows, answers, {0: {0: [0, 1, 2, 3, 4]}})
    assert (found["requests"], found["failed"], found["faults"]) == (4, 1, 1)
    assert (found["tokens_lost"], found["tokens_repeated"], found["tokens_changed"]) == (1, 0, 1)
    assert found["gap_s"]["instance_died_p99"] == 2.5


def test_a_run_in_which_anything_was_lost_says_so() -> None:
    wrong = answer("cmpl-d", [1.0, 1.1, 1.2])
    wrong.tokens[0][2] = 99
    answers = [wrong, answer("cmpl-c", [1.0, 1.1, 1.2], error="cut")]
    rows = rows_of([Fault("kill-driver", "driver", 1.15, None)], [], answers, 1.0)
    expected = {0: {0: [0, 1, 2]}}
    assert broken_promises(summary_of(rows, answers, expected), rows) == [
        "failed: 1",
        "tokens changed: 1",
        "never whole again after: kill-driver",
    ]
    fine = [answer("cmpl-a", [1.0, 1.1, 1.2])]
    assert broken_promises(summary_of([], fine, expected), []) == []
    assert broken_promises(summary_of([], [], expected), []) == ["no requests"]


def test_a_crowded_run_in_which_no_request_waited_has_shown_nothing() -> None:
    expected = {0: {0: [0, 1, 2, 3, 4]}}
    broken = broken_promises(summary_of([], [STEADY], expected), [], is_crowded=True)
    assert broken == ["no request waited at the scheduler"]
    held = summary_of([], [STEADY], expected, num_held=2)
    assert broken_promises(held, [], is_crowded=True) == []


def test_the_page_has_a_line_for_each_event() -> None:
    answers = [STEADY, INTERRUPTED]
    fault = Fault(
        "kill-instance", "i0", 1.15, 9.0, (RequestId("cmpl-b-0-12345678"),), noticed_s=0.05
    )
    rows = rows_of([fault], [], answers, 1.0)
    document = {
        "date": "2026-11-22T00:00:00",
        "commit": "abc",
        "hardware": {"cpu": "a processor", "num_cores": 2},
        "config": {"server": ["--dtype", "float32"], "minutes": 10.0, "streams": 6},
        "rows": rows,
        "goals": [asdict(Goal("that is noticed", "within 1 s", "after 0.05 s", True))],
        "summary": summary_of(rows, answers, {0: {0: [0, 1, 2, 3, 4]}}),
    }
    text = markdown(json.loads(json.dumps(document)))
    assert "| an instance is killed | 1 | 1 | 2.50 | 2.50 | 2.50 | – | – | 0.05 | 9.0 |" in text
    assert "| a request is moved on purpose | 0 | 0 | – | – | – | – | – | – | – |" in text
    assert "- that is noticed: after 0.05 s (goal: within 1 s): reached" in text


def test_questions_are_of_all_kinds_in_turn_and_the_same_each_time() -> None:
    asked = questions("terns", 4, 10, 1, ["greedy", "seeded"])
    assert [each.kind for each in asked] == ["greedy", "seeded"] * 2
    assert asked == questions("terns", 4, 10, 1, ["greedy", "seeded"])
    assert len({str(each.body["prompt"]) for each in asked}) == 4


def test_half_of_the_questions_of_each_kind_begin_alike() -> None:
    asked = questions("terns", 8, 10, 1, ["greedy", "seeded"])
    shared, other = ([each for each in asked if each.number // 2 % 2 == odd] for odd in (0, 1))
    assert len({tuple(each.body["prompt"][:SHARED_TOKENS]) for each in shared}) == 1
    assert {each.kind for each in shared} == {each.kind for each in other} == {"greedy", "seeded"}
    assert len({each.body["prompt"][0] for each in other}) > 1


# -------------------------------------------------------------------------- faults on processes

PEER = """
import socket, sys
wire = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
print("heard", wire.recv(10), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def peer():
    """A process that is connected to us, and waits to hear something."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        process = subprocess.Popen(
            [sys.executable, "-c", PEER, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        wire, _ = server.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        with wire:
            yield process, wire
        process.kill()
        process.communicate()


def test_a_cut_breaks_the_connections_of_a_process_that_lives_on(peer) -> None:
    process, wire = peer
    assert cut(psutil.Process(process.pid)) == 1
    assert process.stdout.readline() == "heard b''\n"
    assert wire.recv(10) == b""
    assert process.poll() is None


def test_a_stopped_process_keeps_its_connections_and_goes_on_afterwards(peer) -> None:
    process, wire = peer
    with stopped(psutil.Process(process.pid)):
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            pass
        wire.sendall(b"terns")
    assert process.stdout.readline() == "heard b'terns'\n"


def test_a_killed_process_ends(peer) -> None:
    process, wire = peer
    kill(psutil.Process(process.pid))
    assert process.wait(60.0) == -9
    assert wire.recv(10) == b""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_minute_of_faults_on_emulated_instances_fails_nothing(tmp_path: Path) -> None:
    assert main(["--quick", "--results", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "chaos.json").read_text())["summary"]
    assert summary["requests"] > 0
    assert summary["faults"] > 0
    differing = ("failed", "tokens_lost", "tokens_repeated", "tokens_changed")
    assert [summary[each] for each in differing] == [0, 0, 0, 0]


def test_of_two_supervisors_the_one_that_does_its_work_is_found() -> None:
    """Ray shows in its title that the other one is in reserve, or begins."""
    calls = (".stand_by", ".run", ".start")
    started = [
        subprocess.Popen([f"{MARKS['supervisor']}{call}", "100"], executable="/usr/bin/sleep")
        for call in calls
    ]
    try:
        processes = [psutil.Process(each.pid) for each in started]
        while not all(each.cmdline() for each in processes):
            pass  # One that has just begun has none yet.
        # What is looked at is a whole title, as of a process that has written its own.
        titles = [each.cmdline() for each in processes]
        assert [title[0] for title in titles] == [f"{MARKS['supervisor']}{call}" for call in calls]
        found = Processes().marked(MARKS["supervisor"])
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert [each.pid for each in found] == [started[1].pid]
