"""The dashboard on a real Prometheus that scrapes a real server: every plot has data under load."""

import contextlib
import json
import math
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.serving.ports import free_port
from scripts.metric_files import RULES, dashboard
from sterna.cli.operate.admin_commands import ask
from tests.needed_tools import missing_program, needs
from tests.serve.emulated.quick import PROFILE, completion, quick_server
from tests.serve.server import ServerProcess, until

pytestmark = [
    *(pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)),
    needs(missing_program("prometheus", "prometheus")),
]

MAX_TOKENS = 1_200
NUM_CONNECTIONS = 16
"""Their requests outgrow the memory of two instances, which preempt."""

VARIABLES = {"$job": ".*", "$__rate_interval": "10s"}
"""Values of Grafana's variables."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # Of the policies, this one lets instances run out of memory, so that they preempt.
    policy = ("--policy", "infaas++")
    options = ("--instances", "2", "--frontends", "2", "--enable-prefix-caching", *policy)
    # Prefix caches need vLLM's own rule of preemption.
    rules = "step_mode: chunked\n  preemption: last_admitted"
    profile = PROFILE.replace("step_mode: chunked", rules)
    folder = tmp_path_factory.mktemp("watched")
    with quick_server(folder, *options, profile=profile) as server:
        yield server


@pytest.fixture
def prometheus(server: ServerProcess, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a Prometheus that scrapes the server every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "sterna",
                "honor_labels": True,
                "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}],
            }
        ],
    }
    path = tmp_path / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    command = (
        *("prometheus", f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            yield client
        finally:
            process.terminate()


@contextlib.contextmanager
def load(server: ServerProcess) -> Iterator[None]:
    """Requests one after the other, on all connections, for as long as the context lasts."""
    ended = threading.Event()

    def send(number: int) -> None:
        with server.http(timeout=300) as http:
            while not ended.is_set():
                http.post("/v1/completions", json=completion(number, MAX_TOKENS))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def move_a_request(server: ServerProcess) -> bool:
    """Move a live request to another instance; returns whether it has moved."""
    # An instance that has just died may still be asked.
    with contextlib.suppress(Exception):
        instances = [row["id"] for row in server.instances() if row["state"] == "running"]
        for row in server.requests():
            others = [each for each in instances if each != row["instance"]]
            body = {"request": row["id"], "to": others[0], "mode": "live"}
            ask(server.url, "POST", "/admin/migrate", None, body)
            return True
    return False


def kill_an_instance(server: ServerProcess) -> None:
    """Kill one that has requests with tokens, which go on elsewhere."""

    busy: list[str] = []

    def has_tokens() -> bool:
        busy[:] = [row["instance"] for row in server.requests() if row["num_output_tokens"] > 1]
        return bool(busy)

    until(has_tokens, "an instance has generated tokens")
    server.instance_process(busy[0]).kill()


def curves() -> dict[str, str]:
    """The dashboard's expressions, by title and legend."""
    found = {}
    for panel in json.loads(dashboard())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            found[f"{panel['title']}: {target['legendFormat']}"] = expression
    return found


def test_every_curve_has_data_under_load(server: ServerProcess, prometheus: httpx.Client) -> None:
    def asked(expression: str) -> list[Any]:
        try:
            answer = prometheus.get("/api/v1/query", params={"query": expression})
        except httpx.TransportError:
            # It has just been started.
            return []
        if answer.status_code != 200:
            assert answer.status_code == 503, (expression, answer.text)
            return []
        return list(answer.json()["data"]["result"])

    def is_finite(title: str) -> bool:
        return any(math.isfinite(float(each["value"][1])) for each in asked(curves()[title]))

    def is_complete() -> bool:
        """Each curve has had a number at some moment; some have one only after a move."""
        move_a_request(server)
        missing.difference_update([title for title in missing if is_finite(title)])
        return not missing

    def rules() -> list[Any]:
        return list(prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"])

    def pages_are_inactive() -> bool:
        """A busy server may answer one scrape too late."""
        pages = [each for each in rules() if each["labels"]["severity"] == "page"]
        return {each["state"] for each in pages} == {"inactive"}

    missing = set(curves())
    with load(server):
        # A rate needs a sample before what it counts.
        until(lambda: bool(asked("sterna_recovery_gap_seconds_count")), "a first sample")
        kill_an_instance(server)
        try:
            until(is_complete, "every curve has data")
        except AssertionError:
            pytest.fail(f"no data in: {sorted(missing)}")
        shown = asked("sterna_instance_used_tokens")
        assert len({each["metric"]["instance"] for each in shown}) > 1
        assert {each["health"] for each in rules()} == {"ok"}
        until(pages_are_inactive, "no page is pending or fires")
