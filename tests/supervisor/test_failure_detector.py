"""The failure detector finds members that have stopped working, soon if certain and late if not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.config import WatchConfig
from sterna.errors import ConfigurationError
from sterna.messages.actors import Heartbeat
from sterna.supervisor.failure_detector import FailureDetector, Halted, ProcessState

CONFIG = WatchConfig(
    instance_timeout_s=10.0, step_timeout_s=60.0, stopped_timeout_s=0.5, own_pause_s=1.0
)
BEAT_S = 0.25


def watching(*members: str) -> FailureDetector:
    detector = FailureDetector(CONFIG)
    for member in members or ("i0",):
        detector.on_joined(member)
    detector.on_time(0.0)
    return detector


def pass_time(
    detector: FailureDetector, now_s: float, until_s: float
) -> list[tuple[float, Halted]]:
    """Look every tenth of a second; returns who was found when."""
    found = []
    while now_s < until_s:
        now_s = round(now_s + 0.1, 6)
        found += [(now_s, each) for each in detector.on_time(now_s)]
    return found


def test_a_process_that_has_ended_is_found_at_the_next_look() -> None:
    detector = watching("i0", "i1")
    detector.on_state("i1", ProcessState.GONE, 0.05)
    assert detector.on_time(0.1) == [Halted("i1", "its process has ended")]


def test_who_was_found_is_not_found_again() -> None:
    detector = watching()
    detector.on_state("i0", ProcessState.GONE, 0.05)
    assert len(detector.on_time(0.1)) == 1
    detector.on_state("i0", ProcessState.GONE, 0.15)
    assert detector.on_time(0.2) == []


def test_a_stopped_process_is_found_within_half_a_second() -> None:
    detector = watching()
    pass_time(detector, 0.0, 1.0)
    detector.on_state("i0", ProcessState.STOPPED, 1.0)
    detector.on_state("i0", ProcessState.STOPPED, 1.2)
    assert pass_time(detector, 1.2, 2.0) == [
        (1.5, Halted("i0", "its process is stopped, for 0.5 s"))
    ]


def test_a_process_that_was_stopped_for_a_moment_goes_on() -> None:
    detector = watching()
    pass_time(detector, 0.0, 1.0)
    detector.on_state("i0", ProcessState.STOPPED, 1.0)
    detector.on_state("i0", ProcessState.RUNNING, 1.25)
    detector.on_state("i0", ProcessState.STOPPED, 1.375)
    assert detector.on_time(1.75) == []
    assert len(detector.on_time(1.875)) == 1


def test_a_process_that_cannot_be_looked_at_counts_as_running() -> None:
    """An error of the watcher's says nothing of the member; its heartbeats do."""
    detector = watching()
    detector.on_heartbeat(Heartbeat("i0", 5, is_busy=False), 0.0)
    detector.on_state("i0", ProcessState.STOPPED, 0.25)
    detector.on_state("i0", ProcessState.UNSEEN, 0.5)
    assert pass_time(detector, 0.5, 9.9) == []
    assert pass_time(detector, 9.9, 10.0) == [
        (10.0, Halted("i0", "nothing was heard of it for 10.0 s"))
    ]


def test_a_member_may_be_given_longer_to_be_stopped() -> None:
    detector = FailureDetector(CONFIG)
    detector.on_joined("front end 0", stopped_timeout_s=3.0)
    detector.on_time(0.0)
    detector.on_state("front end 0", ProcessState.STOPPED, 0.0)
    assert [at_s for at_s, _ in pass_time(detector, 0.0, 5.0)] == [3.0]


def test_a_running_process_that_says_nothing_is_given_up_after_the_instance_timeout() -> None:
    detector = watching()
    detector.on_heartbeat(Heartbeat("i0", 5, is_busy=False), 1.0)
    found = pass_time(detector, 0.0, 12.0)
    assert found == [(11.0, Halted("i0", "nothing was heard of it for 10.0 s"))]


def test_silence_counts_from_the_first_heartbeat_on() -> None:
    """An instance that nobody was told of knows no supervisor to send any."""
    assert pass_time(watching(), 0.0, 100.0) == []


def beats(
    detector: FailureDetector, until_s: float, *, num_ended: int, is_busy: bool
) -> list[Halted]:
    """An instance that answers, and always says the same."""
    now_s, found = 0.0, []
    while now_s < until_s:
        detector.on_heartbeat(Heartbeat("i0", num_ended, is_busy), now_s)
        now_s += BEAT_S
        found += detector.on_time(now_s)
    return found


def test_an_engine_with_work_that_ends_no_step_is_given_up_although_its_instance_answers() -> None:
    detector = watching()
    assert beats(detector, 59.0, num_ended=7, is_busy=True) == []
    found = beats(detector, 62.0, num_ended=7, is_busy=True)
    assert found == [Halted("i0", "its engine has work and has ended no step for 60.0 s")]


def test_an_idle_engine_is_no_hang() -> None:
    assert beats(watching(), 500.0, num_ended=7, is_busy=False) == []


def test_a_step_that_begins_after_a_long_rest_has_the_whole_time() -> None:
    detector = watching()
    beats(detector, 100.0, num_ended=7, is_busy=False)
    detector.on_heartbeat(Heartbeat("i0", 7, is_busy=True), 100.25)
    detector.on_time(100.3)
    detector.on_heartbeat(Heartbeat("i0", 7, is_busy=True), 101.0)
    assert detector.on_time(101.1) == []


def test_a_step_that_is_under_way_at_the_first_heartbeat_has_the_whole_time() -> None:
    """An instance that loads for long, and gets its first request before it has said anything."""
    progress = watching()
    assert pass_time(progress, 0.0, 100.0) == []
    found, now_s = [], 100.0
    while not found:
        progress.on_heartbeat(Heartbeat("i0", 0, is_busy=True), now_s)
        now_s += BEAT_S
        found = progress.on_time(now_s)
    assert now_s == 160.0


def test_a_hang_from_before_a_pause_of_the_watcher_is_found_after_the_time_out() -> None:
    """What waited for it during the pause is handed on before it looks, and counts from then."""
    progress = FailureDetector(CONFIG)
    for member in ("silent", "stopped"):
        progress.on_joined(member)
    progress.on_time(0.0)
    progress.on_heartbeat(Heartbeat("silent", 7, is_busy=False), 3600.0)
    progress.on_state("stopped", ProcessState.STOPPED, 3600.0)
    assert progress.on_time(3600.0) == []
    found = pass_time(progress, 3600.0, 3615.0)
    assert [(now_s, each.member) for now_s, each in found] == [
        (3600.5, "stopped"),
        (3610.0, "silent"),
    ]


def test_a_step_that_hangs_over_a_pause_of_the_watcher_is_found_after_the_time_out() -> None:
    progress = watching()
    progress.on_heartbeat(Heartbeat("i0", 7, is_busy=True), 3600.0)
    assert progress.on_time(3600.0) == []
    found, now_s = [], 3600.0
    while not found:
        progress.on_heartbeat(Heartbeat("i0", 7, is_busy=True), now_s)
        now_s += BEAT_S
        found = progress.on_time(now_s)
    assert now_s == 3660.0


def test_what_was_counted_before_a_pause_of_the_watcher_counts_after_it() -> None:
    """8 of 10 s of silence, and 8 of 60 s of a step."""
    progress = watching("silent", "busy")
    for member in ("silent", "busy"):
        progress.on_heartbeat(Heartbeat(member, 7, is_busy=True), 0.0)
    pass_time(progress, 0.0, 8.0)
    found, now_s = [], 3600.0
    while now_s < 3660.0:
        progress.on_heartbeat(Heartbeat("busy", 7, is_busy=True), now_s)
        found += [(now_s, each.member) for each in progress.on_time(now_s)]
        now_s += BEAT_S
    assert found == [(3602.0, "silent"), (3652.0, "busy")]


def test_a_watcher_that_looks_as_seldom_as_it_may_finds_as_soon() -> None:
    progress = watching()
    progress.on_heartbeat(Heartbeat("i0", 7, is_busy=False), 0.0)
    found = [now_s for now_s in range(1, 12) if progress.on_time(float(now_s))]
    assert found == [10]


def test_what_came_while_the_watcher_did_not_run_is_held_against_nobody() -> None:
    """A machine that slept for an hour: all were stopped, and none of them hangs."""
    detector = watching("i0", "i1")
    for member in ("i0", "i1"):
        detector.on_heartbeat(Heartbeat(member, 7, is_busy=True), 0.1)
    detector.on_state("i1", ProcessState.STOPPED, 0.1)
    detector.on_time(0.2)
    assert detector.on_time(3600.0) == []
    # It is found as soon as if there had been no pause.
    assert detector.on_time(3600.25) == []
    assert detector.on_time(3600.5) == [Halted("i1", "its process is stopped, for 0.6 s")]


def look(detector: FailureDetector, now_s: float, until_s: float) -> list[tuple[float, Halted]]:
    """As `pass_time`, with the node of `i0` in sight."""
    found = []
    while now_s < until_s:
        now_s = round(now_s + 0.1, 6)
        detector.on_state("i0", ProcessState.RUNNING, now_s)
        found += [(now_s, each) for each in detector.on_time(now_s)]
    return found


def watching_remote() -> FailureDetector:
    detector = FailureDetector(CONFIG)
    detector.on_joined("i0", is_remote=True)
    detector.on_time(0.0)
    detector.on_heartbeat(Heartbeat("i0", 5, is_busy=True), 0.0)
    return detector


def test_the_silence_of_a_remote_member_counts_only_while_its_node_is_in_sight() -> None:
    """A cut connection is no hang: it may be mended any time, until the lease ends."""
    detector = watching_remote()
    assert look(detector, 0.0, 8.0) == []
    detector.on_heartbeat(Heartbeat("i0", 6, is_busy=True), 8.0)
    assert pass_time(detector, 8.0, 500.0) == []
    # What it sends comes a little later than the first look.
    assert look(detector, 500.0, 509.0) == []
    detector.on_heartbeat(Heartbeat("i0", 7, is_busy=True), 509.0)
    assert look(detector, 509.0, 518.0) == []


def test_what_was_counted_while_a_node_was_in_sight_counts_when_it_is_again() -> None:
    """8 of 10 s of silence, before it was out of sight for 100 s."""
    progress = watching_remote()
    progress.on_state("i0", ProcessState.RUNNING, 0.0)
    assert look(progress, 0.0, 8.0) == []
    assert pass_time(progress, 8.0, 107.5) == []
    found = []
    for now_s in (108.0, 109.0, 109.75, 110.0):
        progress.on_state("i0", ProcessState.RUNNING, now_s)
        found += [(now_s, each.member) for each in progress.on_time(now_s)]
    assert found == [(110.0, "i0")]


def test_a_remote_member_in_sight_that_says_nothing_is_given_up_as_any_other() -> None:
    detector = watching_remote()
    found = look(detector, 0.0, 12.0)
    assert [each.reason for _, each in found] == ["nothing was heard of it for 10.0 s"]


def test_a_remote_member_whose_node_was_never_in_sight_is_not_judged() -> None:
    detector = watching_remote()
    assert pass_time(detector, 0.0, 500.0) == []
    assert look(detector, 500.0, 509.0) == []
    assert len(look(detector, 509.0, 511.0)) == 1


def test_the_node_of_a_remote_member_is_in_sight_as_long_as_a_pause_may_be() -> None:
    """Looked at once in a second, which is what the watcher's own pauses may be."""
    progress = watching_remote()
    for now_s in range(12):
        progress.on_state("i0", ProcessState.RUNNING, float(now_s))
        found = pass_time(progress, float(now_s), now_s + 0.9)
        assert bool(found) == (now_s == 10)


def test_a_pause_of_the_watcher_takes_no_remote_node_out_of_sight() -> None:
    """It did not look at the node meanwhile, either: silence goes on counting."""
    progress = watching_remote()
    look(progress, 0.0, 5.0)
    progress.on_heartbeat(Heartbeat("i0", 6, is_busy=True), 5.0)
    assert progress.on_time(100.0) == []
    found = look(progress, 100.0, 111.0)
    assert [now_s for now_s, _ in found] == [110.0]


def test_a_node_that_is_cut_off_during_a_pause_of_the_watcher_is_out_of_sight() -> None:
    progress = watching_remote()
    look(progress, 0.0, 5.0)
    progress.on_heartbeat(Heartbeat("i0", 6, is_busy=True), 5.0)
    assert progress.on_time(100.0) == []
    assert pass_time(progress, 100.0, 200.0) == []
    # It was looked at once more, just before the watcher was.
    progress.on_state("i0", ProcessState.RUNNING, 300.0)
    assert progress.on_time(300.0) == []
    assert pass_time(progress, 300.0, 500.0) == []


def test_a_pause_of_the_watcher_brings_no_node_into_sight() -> None:
    progress = watching_remote()
    look(progress, 0.0, 5.0)
    assert pass_time(progress, 5.0, 50.0) == []
    assert progress.on_time(52.0) == []


def test_a_remote_member_is_not_stopped_while_its_node_is_out_of_sight() -> None:
    progress = FailureDetector(CONFIG)
    progress.on_joined("i0", is_remote=True, stopped_timeout_s=30.0)
    progress.on_time(0.0)
    progress.on_state("i0", ProcessState.STOPPED, 0.0)
    pass_time(progress, 0.0, 20.0)
    progress.on_state("i0", ProcessState.STOPPED, 20.0)
    found = []
    for tenth in range(201, 600):
        progress.on_state("i0", ProcessState.STOPPED, tenth / 10)
        found += [(tenth / 10, each.member) for each in progress.on_time(tenth / 10)]
    assert found == [(50.0, "i0")]


def test_who_has_left_is_not_found() -> None:
    detector = watching()
    detector.on_left("i0")
    detector.on_state("i0", ProcessState.GONE, 0.1)
    detector.on_heartbeat(Heartbeat("i0", 1, is_busy=True), 0.1)
    assert pass_time(detector, 0.0, 100.0) == []


@given(
    num_ended=st.lists(st.integers(0, 1), min_size=1, max_size=300),
    late_s=st.lists(st.floats(0.0, 5.0), min_size=300, max_size=300),
)
def test_an_instance_that_gets_on_is_never_found_however_late_its_heartbeats_are(
    num_ended: list[int], late_s: list[float]
) -> None:
    """Late by up to half of the time-out, on a machine that is overloaded."""
    detector, now_s, total = watching(), 0.0, 0
    for more, delay_s in zip(num_ended, late_s, strict=False):
        total += more
        detector.on_state("i0", ProcessState.RUNNING, now_s)
        detector.on_heartbeat(Heartbeat("i0", total, is_busy=more == 1), now_s)
        assert pass_time(detector, now_s, now_s + delay_s) == []
        now_s += delay_s


@given(
    hangs_s=st.floats(0.1, 100.0),
    is_loop_hanging=st.booleans(),
    beat_s=st.floats(0.05, 2.0),
)
def test_an_instance_that_hangs_is_always_found(
    hangs_s: float, is_loop_hanging: bool, beat_s: float
) -> None:
    detector, now_s, found = watching(), 0.0, []
    next_beat_s = 0.0
    while not found:
        assert now_s < hangs_s + CONFIG.step_timeout_s + CONFIG.instance_timeout_s + beat_s
        hangs = now_s >= hangs_s
        if now_s >= next_beat_s and not (hangs and is_loop_hanging):
            ended = int(min(now_s, hangs_s) / beat_s)
            detector.on_heartbeat(Heartbeat("i0", ended, is_busy=True), now_s)
            next_beat_s = now_s + beat_s
        now_s += 0.1
        found = detector.on_time(now_s)
    assert now_s >= hangs_s


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"instance_timeout_s": 0.5}, "instance_timeout_s must be at least 1 second, not 0.5"),
        ({"step_timeout_s": 0.0}, "step_timeout_s must be at least 1 second, not 0.0"),
        ({"stopped_timeout_s": 0.0}, "stopped_timeout_s must be positive"),
    ],
)
def test_a_time_out_that_would_kill_the_healthy_is_refused(
    options: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        WatchConfig(**options)


def test_a_member_may_be_given_longer_to_be_silent() -> None:
    """A front end that hangs may go on, and its end would cut its streams."""
    detector = FailureDetector(CONFIG)
    detector.on_joined("scheduler")
    detector.on_joined("front end 0", silence_timeout_s=30.0)
    for member in ("scheduler", "front end 0"):
        detector.on_heartbeat(Heartbeat(member, 0, is_busy=False), 0.0)
    found = pass_time(detector, 0.0, 40.0)
    assert [(now_s, each.member) for now_s, each in found] == [
        (10.0, "scheduler"),
        (30.0, "front end 0"),
    ]
