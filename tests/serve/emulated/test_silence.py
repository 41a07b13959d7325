"""The scheduler, instances and front ends that die, are stopped or hang: who is noticed when, and
what other requests wait for."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.serve.emulated.quick import completion, quick_server
from tests.serve.frozen import frozen
from tests.serve.load import Load
from tests.serve.resuming import connected
from tests.serve.server import START_TIMEOUT_S, ServerProcess, has_ended, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SCHEDULER, FRONTEND = "ray::_SchedulerActor", "ray::_FrontendActor"
INSTANCE = "ray::_InstanceActor"
INSTANCE_TIMEOUT_S = 20
MAX_WAIT_S = INSTANCE_TIMEOUT_S / 2
"""Nobody waits until somebody's silence is noticed."""
NUM_CLIENTS = 4
MAX_TOKENS = 6000
"""Two minutes of a stream: twice as long as the silence of a front end takes to be noticed."""
NUM_TOKENS = 4
"""A request that takes a tenth of a second: what it waits for is its dispatch."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--instances", "2", "--frontends", "2")
    silence = ("--instance-timeout", str(INSTANCE_TIMEOUT_S))
    with quick_server(tmp_path_factory.mktemp("profile"), *options, *silence) as server:
        until_whole(server)
        yield server


def until_whole(server: ServerProcess) -> None:
    """Until each does its work."""

    def is_whole() -> bool:
        return len(server.at_work(SCHEDULER)) == 1 and len(server.at_work(FRONTEND)) == 2

    until(is_whole, "everything is up", START_TIMEOUT_S)


def times_lost(server: ServerProcess, who: str, why: str) -> int:
    return len(re.findall(rf"{who} lost.* reason=.*{why}", server.log))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_short_requests_go_on_without_a_scheduler(
    server: ServerProcess, number: signal.Signals
) -> None:
    """How much longer they wait is printed; that none waits for a time-out is asserted."""
    until_whole(server)
    with Load(server, NUM_CLIENTS, num_tokens=NUM_TOKENS) as load:
        load.until_ended(10 * NUM_CLIENTS)
        before = load.until_ended(20 * NUM_CLIENTS)
        scheduler = server.at_work(SCHEDULER)[0]
        scheduler.send_signal(number)
        after = load.until_ended(20 * NUM_CLIENTS)
        until(lambda: not scheduler.is_running(), "it has ended, if it was stopped only")
        until(lambda: bool(server.at_work(SCHEDULER)), "there is another", START_TIMEOUT_S)
        last = load.until_ended(10 * NUM_CLIENTS)
    assert after.failures == last.failures == []
    longest_wait_s = max(after.longest_wait_s, last.longest_wait_s)
    extra_s = longest_wait_s - before.longest_wait_s
    print(f"waits of up to {before.longest_wait_s:.3f} s, {extra_s:+.3f} s without a scheduler")
    assert longest_wait_s < MAX_WAIT_S


def test_a_scheduler_that_hangs_is_noticed_by_its_silence_and_replaced(
    server: ServerProcess,
) -> None:
    """Requests go on meanwhile: some end before its silence is noticed, and none waits for that."""
    until_whole(server)

    def num_lost() -> int:
        return times_lost(server, "global scheduler", "nothing was heard of it")

    num_before = num_lost()
    with Load(server, NUM_CLIENTS, num_tokens=NUM_TOKENS) as load:
        before = load.until_ended(10 * NUM_CLIENTS)
        with frozen(server.at_work(SCHEDULER)[0].pid):
            # Those of before may be among the first; the others were begun without a scheduler.
            meanwhile = load.until_ended(2 * NUM_CLIENTS)
            assert num_lost() == num_before
            until(lambda: num_lost() > num_before, "its silence is noticed")
            after = load.until_ended(10 * NUM_CLIENTS)
    assert meanwhile.failures == after.failures == []
    longest_wait_s = max(meanwhile.longest_wait_s, after.longest_wait_s)
    print(f"waits of up to {before.longest_wait_s:.3f} s, then of {longest_wait_s:.3f} s")
    assert longest_wait_s < MAX_WAIT_S
    until_whole(server)


def test_an_instance_that_hangs_is_noticed_by_its_silence_and_its_streams_go_on(
    server: ServerProcess,
) -> None:
    """All of it stands still, not only its engine; no client sees more than a pause."""
    until_whole(server)
    sent_again = "request sent again"
    num_before = server.log.count(sent_again)
    victim = server.at_work(INSTANCE)[0]
    with Load(server, NUM_CLIENTS) as load:
        before = load.until_ended(NUM_CLIENTS)
        with frozen(victim.pid):
            until(
                lambda: times_lost(server, "instance", "nothing was heard of it") == 1,
                "its silence is noticed",
            )
            until(lambda: has_ended(victim), "it has ended")
        after = load.until_ended(4 * NUM_CLIENTS)
    assert before.failures == after.failures == []
    assert server.log.count(sent_again) > num_before, "it had some of the streams"
    until(
        lambda: [each["state"] for each in server.instances()] == ["running"] * 2,
        "it is replaced",
        START_TIMEOUT_S,
    )


@contextmanager
def streams_at_both(server: ServerProcess, victim: psutil.Process) -> Iterator[Callable[[], None]]:
    """A stream at each front end; yields what reads one piece of that which goes on.

    Asserts that the other one breaks off, and that this one does not.
    """
    (other,) = {*server.at_work(FRONTEND)} - {victim}
    body = completion(1, MAX_TOKENS)
    with (
        connected(server, victim) as victims,
        connected(server, other) as others,
        victims.stream("POST", "/v1/completions", json=body) as broken,
        others.stream("POST", "/v1/completions", json=body) as whole,
    ):
        breaking, going_on = broken.iter_lines(), whole.iter_lines()
        next(breaking)

        def read() -> None:
            line = next(going_on)
            assert "error" not in line
            assert "[DONE]" not in line

        read()
        yield read
        with pytest.raises(httpx.TransportError):
            list(breaking)
        for _ in range(20):
            read()


def test_a_front_end_that_is_stopped_is_ended_and_replaced(server: ServerProcess) -> None:
    """The stream of the other one goes on all the while."""
    until_whole(server)
    victim = server.at_work(FRONTEND)[0]
    with streams_at_both(server, victim) as read:
        victim.suspend()
        while not has_ended(victim):
            read()
    until_whole(server)
    with Load(server, NUM_CLIENTS, num_tokens=NUM_TOKENS) as load:
        assert load.until_ended(4 * NUM_CLIENTS).failures == []


def test_a_front_end_that_hangs_is_noticed_by_its_silence_and_replaced(
    server: ServerProcess,
) -> None:
    """Later than another one would be: it may go on, and its end cuts its streams. The stream of
    the other one goes on all the while."""
    until_whole(server)
    victim = server.at_work(FRONTEND)[0]

    def num_lost() -> int:
        return times_lost(server, "front end", "nothing was heard of it")

    num_before = num_lost()
    with streams_at_both(server, victim) as read, frozen(victim.pid):
        while num_lost() == num_before:
            read()
    until_whole(server)
    with Load(server, NUM_CLIENTS, num_tokens=NUM_TOKENS) as load:
        assert load.until_ended(4 * NUM_CLIENTS).failures == []
