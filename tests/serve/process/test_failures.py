"""Any one component fails under load, and no client of another notices: one server of emulated
engines goes through all of it."""

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from bench.serving.ports import is_port_free
from sterna.cli.operate.admin_commands import ServerError, ask
from sterna.config import FrontendConfig
from tests.serve.emulated.quick import MODEL, quick_server
from tests.serve.load import Load, Seen
from tests.serve.server import (
    END_TIMEOUT_S,
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    ServerProcess,
    has_ended,
    logged_s,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_INSTANCES = 3
NUM_CLIENTS = 6
STEP_TIMEOUT_S = 10.0
MAX_WAIT_S = FrontendConfig().hold_timeout_s / 2
"""Half of what a request waits that nobody takes. How long they do wait is printed, and
docs/benchmarks.md has what was measured."""

PROFILE = """
name: quick
description: an engine with steps of some milliseconds, and steps without end for long prompts
source: made up for this test
engine:
  num_blocks: 400
  step_mode: chunked
  max_num_batched_tokens: 512
step_time:
  prefill_s: 0.002
  prefill_token_s: 1.0e-5
  prefill_pair_s: 1.0e-3
  prefill_min_s: 0.004
  decode_s: 0.02
  decode_request_s: 1.0e-5
  decode_token_s: 1.0e-8
copy_time:
  block_s: 0.0002
  stage_s: 0.004
"""
DRIVER, GCS = "sterna.runtime.home.driver", "gcs_server"
FORK_SERVER = "sterna.runtime.fork_server.fork_server"
MANAGERS = ("ray::_SupervisorActor", DRIVER, GCS)

ENDLESS_PROMPT = "terns " * 400
"""Its first step takes a minute: to who looks at it, the engine hangs."""


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """With two front ends, or as many as the test's parameter says."""
    num_frontends = getattr(request, "param", 2)
    options = (
        *("--instances", str(NUM_INSTANCES), "--step-timeout", str(STEP_TIMEOUT_S)),
        *("--frontends", str(num_frontends)),
    )
    with quick_server(tmp_path_factory.mktemp("profile"), *options, profile=PROFILE) as server:
        with Load(server, NUM_CLIENTS) as load:
            # What is done for the first time takes longer.
            load.until_ended(2 * NUM_CLIENTS)
        yield server


def processes_of(server: ServerProcess, what: str) -> list[psutil.Process]:
    """The processes with this in their command lines, or in the titles that Ray gives them."""
    return [each for each in server.processes() if what in _command(each)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        # It has ended meanwhile.
        return ""


def serving(server: ServerProcess) -> set[str]:
    """The instances that serve, and no others are there."""
    try:
        states = {each["id"]: each["state"] for each in server.instances()}
    except (ServerError, httpx.HTTPError):
        return set()
    return set(states) if set(states.values()) == {"running"} else set()


def newest_instance(server: ServerProcess) -> psutil.Process:
    return max(processes_of(server, "ray::_InstanceActor"), key=lambda each: each.create_time())


def until_whole(server: ServerProcess) -> set[str]:
    until(lambda: len(serving(server)) == NUM_INSTANCES, "all serve", START_TIMEOUT_S)
    return serving(server)


def assert_nobody_noticed(before: Seen, after: Seen) -> None:
    assert after.failures == []
    assert after.num_ended > 0
    print(f"waits of up to {before.longest_wait_s:.3f} s, then of {after.longest_wait_s:.3f} s")
    assert after.longest_wait_s < MAX_WAIT_S


def busy_instance(server: ServerProcess) -> str:
    """The instance of the request that has the most before it."""
    requests: list[dict[str, Any]] = []

    def is_known() -> bool:
        requests[:] = sorted(server.requests(), key=lambda each: each["num_output_tokens"])
        return bool(requests)

    until(is_known, "a request runs")
    return str(requests[0]["instance"])


def assert_lost_before_its_requests_went_on(
    server: ServerProcess, instance_id: str, num_lines_before: int
) -> None:
    """By the times in the log, whose lines come from several processes."""
    again = "request sent again "
    until(lambda: any(again in each for each in server.lines[num_lines_before:]), "it had requests")
    lines = server.lines[num_lines_before:]
    assert logged_s(lines, f"instance lost instance={instance_id} ") <= logged_s(lines, again)


def test_a_stopped_instance_is_ended_before_its_streams_go_on_and_it_is_replaced(
    server: ServerProcess,
) -> None:
    """For being stopped, not for its silence: the log says so."""
    until_whole(server)
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(NUM_CLIENTS)
        num_before = len(server.lines)
        victim = busy_instance(server)
        process = server.instance_process(victim)
        process.suspend()
        server.until_line(
            rf"instance lost instance={victim} reason=its process is stopped", HANG_TIMEOUT_S
        )
        # SIGKILL also ends what is stopped: it will not go on and step its requests a second time.
        assert has_ended(process)
        after = load.until_ended(3 * NUM_CLIENTS)
    assert after.failures == load.seen().failures == []
    assert_lost_before_its_requests_went_on(server, victim, num_before)
    assert victim not in until_whole(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_while_there_is_no_scheduler_requests_are_dispatched_by_the_front_ends(
    server: ServerProcess, number: signal.Signals
) -> None:
    """ "[The system] temporarily falls back to a scheduler-bypassing mode" (Section 5, Fault
    tolerance)."""
    with Load(server, NUM_CLIENTS) as load:
        before = load.until_ended(3 * NUM_CLIENTS)
        scheduler = server.at_work("ray::_SchedulerActor")[0]
        scheduler.send_signal(number)
        assert_nobody_noticed(before, load.until_ended(3 * NUM_CLIENTS))
        until(lambda: not scheduler.is_running(), "it has ended, if it was stopped only")
        until(lambda: len(serving(server)) == NUM_INSTANCES, "another scheduler knows them all")
        assert_nobody_noticed(before, load.until_ended(NUM_CLIENTS))


def test_a_fork_server_that_is_stopped_is_replaced_and_no_stream_notices(
    server: ServerProcess,
) -> None:
    """Its forks live on, and who is started after it is a fork of the next one."""
    before = fork_server(server)
    assert before is not None
    with Load(server, NUM_CLIENTS) as load:
        seen = load.until_ended(3 * NUM_CLIENTS)
        before.suspend()
        until(lambda: fork_server(server) not in (before, None), "there is another")
        assert_nobody_noticed(seen, load.until_ended(3 * NUM_CLIENTS))
    assert has_ended(before)
    now = fork_server(server)
    processes_of(server, "ray::_FrontendActor")[0].kill()

    def parents() -> list[psutil.Process | None]:
        frontends = processes_of(server, "ray::_FrontendActor")
        return [each.parent() for each in frontends if not has_ended(each)]

    until(lambda: len(parents()) == 2 and now in parents(), "it has a fork")


def fork_server(server: ServerProcess) -> psutil.Process | None:
    """Forks have its command line until they have become who they are."""
    own = psutil.Process(server.pid).children()
    return next((each for each in own if FORK_SERVER in _command(each)), None)


def test_what_a_dead_front_end_had_is_freed_and_the_other_goes_on(server: ServerProcess) -> None:
    """Whose clients are whose is left to the kernel: with so many, both have some.

    No stream comes to its end by itself, so that the dead one's requests would go on for nobody.
    """
    until(lambda: num_accepting(server) == 2, "whoever was started last accepts connections")
    max_tokens = 3000
    streams = [server.stream(max_tokens, model=MODEL) for _ in range(16)]
    reading = [iter(each) for each in streams]
    for each in reading:
        next(each)
    processes_of(server, "ray::_FrontendActor")[0].kill()
    with ThreadPoolExecutor(len(streams)) as pool:
        goes_on = list(pool.map(has_so_many_more, reading))
    assert 0 < sum(goes_on) < len(streams)
    for each in streams:
        each.close()
    began_s = time.monotonic()
    server.until_freed(max_tokens)
    print(f"all freed {time.monotonic() - began_s:.1f} s after the other streams were left")
    until(lambda: len(processes_of(server, "ray::_FrontendActor")) == 2, "there is another")


def num_accepting(server: ServerProcess) -> int:
    """How many front ends listen at the server's port."""
    found = 0
    for each in processes_of(server, "ray::_FrontendActor"):
        with contextlib.suppress(psutil.Error):
            sockets = each.net_connections("tcp")
            found += any(
                socket.status == psutil.CONN_LISTEN and socket.laddr.port == server.port
                for socket in sockets
            )
    return found


def has_so_many_more(stream: Iterator[Any], num_chunks: int = 50) -> bool:
    """Whether so many come before the stream breaks off."""
    try:
        return sum(1 for _ in itertools.islice(stream, num_chunks)) == num_chunks
    except (httpx.TransportError, openai.APIError):
        return False


@pytest.mark.parametrize(
    ("what", "number"),
    [
        *itertools.product(MANAGERS, (signal.SIGKILL, signal.SIGSTOP)),
        # The supervisor works on.
        *itertools.product((DRIVER, GCS), (signal.SIGTERM,)),
    ],
    ids={signal.SIGKILL: "killed", signal.SIGSTOP: "stopped", signal.SIGTERM: "terminated"}.get,
)
def test_what_only_manages_is_replaced_and_no_stream_notices(
    server: ServerProcess, what: str, number: signal.Signals
) -> None:
    """The supervisor, the driver, and Ray's own memory of the cluster."""
    with Load(server, NUM_CLIENTS) as load:
        before = load.until_ended(3 * NUM_CLIENTS)
        old = server.at_work(what)[0]
        old.send_signal(number)
        until(lambda: not old.is_running(), "it has ended, if it was stopped only")
        until(lambda: bool(server.at_work(what)), "there is another")
        assert_nobody_noticed(before, load.until_ended(3 * NUM_CLIENTS))
    # All that they do works again: whoever dies next is noticed, and replaced.
    before_ids = until_whole(server)
    newest_instance(server).kill()
    until(lambda: serving(server) != before_ids, "its death is known")
    assert len(before_ids - until_whole(server)) == 1


def test_a_start_that_is_asked_for_while_the_gcs_is_away_comes_to_pass(
    server: ServerProcess,
) -> None:
    """It is stopped, and for seconds nobody takes it for lost."""
    before_ids = until_whole(server)
    gcs = server.at_work("gcs_server")[0]
    gcs.suspend()
    ask(server.url, "POST", "/admin/start", None, {"instances": 1})
    until(lambda: len(serving(server)) == NUM_INSTANCES + 1, "it serves", START_TIMEOUT_S)
    assert has_ended(gcs)
    (started,) = serving(server) - before_ids
    ask(server.url, "POST", "/admin/drain", None, {"instance": started})
    until(lambda: serving(server) == before_ids, "there are as many as before")


def test_after_all_of_it_ctrl_c_leaves_nothing_behind(server: ServerProcess) -> None:
    """The last test of this module: it ends the server."""
    folder = server.folder()
    family = server.processes()
    server.interrupt()
    assert server.until_end() == 0
    _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    assert not alive
    assert is_port_free(server.port)
    # Its sockets, and what Ray's GCS knew.
    assert not folder.exists()
    assert "Traceback" not in server.log


@pytest.mark.parametrize("server", [1], indirect=True)
def test_an_instance_that_answers_and_steps_nothing_is_ended_before_its_streams_go_on(
    server: ServerProcess,
) -> None:
    """And it is replaced; what made two of them hang ends with an error, and nothing else does: as
    long as there is one front end, which knows of all that were there
    (docs/operations/failures.md)."""
    before_ids = until_whole(server)
    processes = {each: server.instance_process(each) for each in before_ids}
    body = {"model": MODEL, "prompt": ENDLESS_PROMPT, "max_tokens": 3}
    with Load(server, NUM_CLIENTS) as load, server.http(timeout=START_TIMEOUT_S) as http:
        load.until_ended(NUM_CLIENTS)
        num_before = len(server.lines)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/v1/completions", json=body)
            lost = server.until_line(
                r"instance lost instance=(i\d+) reason=its engine has work and has ended no step",
                HANG_TIMEOUT_S,
            )
            assert has_ended(processes[lost[1]])
            assert answer.result().status_code == 500
        after = load.until_ended(3 * NUM_CLIENTS)
    assert after.failures == load.seen().failures == []
    assert_lost_before_its_requests_went_on(server, lost[1], num_before)
    assert lost[1] not in until_whole(server)
