"""Every member of a server may die: what goes on, what ends clearly, what is replaced (Section 5,
"Fault tolerance")."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx
import openai
import psutil
import pytest

from sterna.cli.operate.admin_commands import ServerError, ask
from tests.serve.server import (
    HANG_TIMEOUT_S,
    MODEL_NAME,
    START_TIMEOUT_S,
    ServerProcess,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = start_sterna("--no-migration")
    yield server
    server.end()


def num_tokens(chunks: Iterable[Any]) -> int:
    """Of all these chunks of a stream, which may have several each."""
    return sum(len(chunk.choices[0].token_ids) for chunk in chunks if chunk.choices)


def answers(server: ServerProcess) -> bool:
    try:
        answer = server.client().completions.create(model=MODEL_NAME, prompt="Terns", max_tokens=3)
    except openai.APIError:
        return False
    return answer.usage.completion_tokens == 3


def busy_instance(server: ServerProcess) -> str:
    """The one that has the one request, once its load report says so."""
    busy: list[str] = []

    def is_known() -> bool:
        busy[:] = [each["id"] for each in server.instances() if each["running"]]
        return len(busy) == 1

    until(is_known, "an instance has the request")
    return busy[0]


def knows_its_instances(server: ServerProcess, *expected: str) -> bool:
    try:
        states = {each["id"]: each["state"] for each in server.instances()}
    except ServerError:
        return False
    return states == dict.fromkeys(expected, "running")


def test_the_streams_of_a_killed_instance_go_on_and_it_is_replaced(server: ServerProcess) -> None:
    outcomes: list[str] = []

    def stream() -> None:
        try:
            outcomes.append(str(list(server.stream(max_tokens=500))[-1].choices[0].finish_reason))
        except Exception as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: sum(each["running"] for each in server.instances()) == 2, "both streams run")
    # One on each, but where the scheduler was too slow to be asked for both.
    victim = max(server.instances(), key=lambda each: each["running"])["id"]
    (other,) = {"i0", "i1"} - {victim}
    ready = server.until_line(rf"instance {victim} pid=(\d+)", HANG_TIMEOUT_S)
    psutil.Process(int(ready[1])).kill()
    for thread in threads:
        thread.join(HANG_TIMEOUT_S)
    assert outcomes == ["length", "length"]
    # An id is never used again.
    until(
        lambda: knows_its_instances(server, other, "i2"), "the replacement serves", START_TIMEOUT_S
    )
    assert answers(server)


def test_killed_schedulers_and_front_ends_are_replaced(server: ServerProcess) -> None:
    """ "Llumnix allows the request frontends to directly dispatch requests to instances" while
    there is no global scheduler."""
    # More than a minute of tokens: it does not end before there is another front end to ask.
    stream = iter(server.stream(max_tokens=2000))
    next(stream)
    server.at_work("ray::_SchedulerActor")[0].kill()
    assert answers(server)
    until(lambda: knows_its_instances(server, "i0", "i1"), "a scheduler is back", START_TIMEOUT_S)
    # More than what had come before the scheduler died.
    assert num_tokens(itertools.islice(stream, 300)) >= 300

    server.at_work("ray::_FrontendActor")[0].kill()
    with pytest.raises((httpx.TransportError, openai.APIError)):
        list(stream)
    until(lambda: answers(server), "a front end is back", START_TIMEOUT_S)
    server.until_freed(2000)


def test_a_killed_supervisor_has_a_successor_that_goes_on_in_the_middle(
    server: ServerProcess,
) -> None:
    """It dies while an instance starts and another one is being drained: both go on, and no stream
    notices."""
    stream = iter(server.stream(max_tokens=1000))
    first = next(stream)
    busy = busy_instance(server)
    ask(server.url, "POST", "/admin/drain", None, {"instance": busy})
    ask(server.url, "POST", "/admin/start", None, {"instances": 1})
    server.at_work("ray::_SupervisorActor")[0].kill()
    server.until_line("supervisor took over", HANG_TIMEOUT_S)
    assert num_tokens([first, *stream]) == 1000
    (idle,) = {"i0", "i1"} - {busy}

    def is_as_wanted() -> bool:
        return knows_its_instances(server, idle, "i2") or knows_its_instances(server, idle, "i3")

    until(is_as_wanted, "the drain and the start are done", START_TIMEOUT_S)
    assert answers(server)


def test_an_instance_that_dies_while_it_is_drained_is_not_replaced(server: ServerProcess) -> None:
    stream = iter(server.stream(max_tokens=1500))
    first = next(stream)
    busy = busy_instance(server)
    ready = server.until_line(rf"instance {busy} pid=(\d+)", HANG_TIMEOUT_S)
    # Without migration the drain waits for the stream's end.
    ask(server.url, "POST", "/admin/drain", None, {"instance": busy})
    until(lambda: _state(server, busy) == "terminating", "it is being drained")
    psutil.Process(int(ready[1])).kill()
    assert num_tokens([first, *stream]) == 1500
    (idle,) = {"i0", "i1"} - {busy}
    until(lambda: knows_its_instances(server, idle), "the other one is all there is")
    assert answers(server)
    # Instances are numbered in the order in which they are begun: nobody has begun one before.
    ask(server.url, "POST", "/admin/start", None, {"instances": 1})
    until(lambda: _state(server, "i2") == "running", "it is there", START_TIMEOUT_S)
    assert knows_its_instances(server, idle, "i2")


def test_a_drain_survives_the_scheduler(server: ServerProcess) -> None:
    stream = iter(server.stream(max_tokens=300))
    first = next(stream)
    busy = busy_instance(server)
    ask(server.url, "POST", "/admin/drain", None, {"instance": busy})
    server.at_work("ray::_SchedulerActor")[0].kill()
    assert num_tokens([first, *stream]) == 300
    (idle,) = {"i0", "i1"} - {busy}
    until(lambda: knows_its_instances(server, idle), "the drained one has ended", START_TIMEOUT_S)


def _state(server: ServerProcess, instance_id: str) -> str | None:
    states = {each["id"]: each["state"] for each in server.instances()}
    return states.get(instance_id)


def test_who_does_not_know_the_token_cannot_use_the_ray_of_a_server(server: ServerProcess) -> None:
    """Ray's ports are open to the network, and whoever may use them can run code here."""
    (gcs,) = [p for p in server.processes() if p.name() == "gcs_server"]
    ports = [c.laddr.port for c in gcs.net_connections() if c.status == psutil.CONN_LISTEN]
    token = gcs.environ()["RAY_AUTH_TOKEN"]
    answered = [port for port in ports if _answers(port, {"RAY_AUTH_TOKEN": token})]
    assert answered, "who knows the token is let in"
    for port in answered:
        assert not _answers(port, {"RAY_AUTH_MODE": "disabled"})
        assert not _answers(port, {"RAY_AUTH_TOKEN": "x" * len(token)})


ASK_RAY = """
import sys
from ray._raylet import GcsClient

print("nodes:", len(GcsClient(sys.argv[1]).get_all_node_info(timeout=10)))
"""
"""What a driver asks of a cluster's GCS before all else."""


def _answers(port: int, credentials: Mapping[str, str]) -> bool:
    """Whether the GCS that listens there answers to these."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    asked = subprocess.run(
        [sys.executable, "-c", ASK_RAY, f"127.0.0.1:{port}"],
        env={**known, "RAY_AUTH_MODE": "token", **credentials},
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
        check=False,
    )
    return "nodes: " in asked.stdout
