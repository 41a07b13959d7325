"""A workload sent to a server that is watched meanwhile."""

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bench.serving.client import ClientConfig
from bench.serving.observer import ClusterSample
from bench.serving.session import ServedRun, run_trace
from bench.serving.target import Target
from sterna.errors import ConfigurationError
from sterna.workload.trace import Trace
from tests.bench.serving.sse_server import Body, CompletionsServer, all_tokens, running, token

TRACE = Trace(
    "test",
    np.array([0.0, 0.0, 0.05]),
    np.array([4, 5, 6]),
    np.array([2, 3, 4]),
    np.zeros(3, np.int64),
)


def listed(**more: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": "i0",
            "state": "running",
            "total_tokens": 1000,
            "used_tokens": 250,
            "freeness": None,
            "running": 1,
            "queuing": 0,
            "migrating": 0,
            "head_demand_tokens": 0,
            "preemptions": 0,
            "migrations_committed": 0,
            "migrations_aborted": 0,
            "of another version": 1,
            **more,
        }
    ]


def run(server: CompletionsServer) -> tuple[ServedRun, int]:
    """The run, and how often it was told that a request had ended."""
    num_told = 0

    def on_ended() -> None:
        nonlocal num_told
        num_told += 1

    async def send() -> ServedRun:
        async with running(server) as target:
            config = ClientConfig(seed=1)
            return await run_trace(target, TRACE, config, interval_s=0.01, on_ended=on_ended)

    return asyncio.run(send()), num_told


def test_requests_and_instances_are_recorded_together() -> None:
    instances = [listed(), listed(preemptions=2, migrations_committed=3)]
    done, num_told = run(CompletionsServer(instances=instances))
    summary = done.summary()
    assert (summary.num_requests, summary.num_completed, num_told) == (3, 3, 3)
    assert summary.num_preemptions == 2
    assert summary.migrations_committed == 3
    assert summary.instances_avg == 1.0
    assert done.instances() == 1
    assert done.cluster.free_tokens.tolist() == [750] * len(done.cluster.free_tokens)
    assert len(done.samples) >= 2, "before and after, and whenever there was time between"
    assert summary.simulated_s >= 0.05


def test_a_server_that_is_not_sternas_is_measured_all_the_same() -> None:
    done, _ = run(CompletionsServer())
    assert done.samples == ()
    assert done.instances() is None
    assert done.summary().num_completed == 3
    assert done.summary().migrations_committed is None


def test_a_page_of_something_else_is_not_taken_for_instances() -> None:
    done, _ = run(CompletionsServer(instances=[[{"id": "i0"}]]))
    assert done.samples == ()


def test_errors_are_counted_the_most_frequent_first() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        if body["max_tokens"] == 2:
            await token(stream)
        else:
            await all_tokens(stream, {"max_tokens": 1})

    done, _ = run(CompletionsServer(answer))
    assert dict(done.errors()) == {
        "cut: an unknown number of 2 tokens came": 1,
        "cut: 1 of 3 tokens came": 1,
        "cut: 1 of 4 tokens came": 1,
    }
    assert done.summary().num_completed == 0


def test_a_server_that_keeps_its_instances_to_itself_is_refused() -> None:
    """Nothing is sent before: the run would lack half of what it is for."""
    server = CompletionsServer(instances=[listed()], api_key="sesame")

    async def send() -> ServedRun:
        async with running(server) as target:
            nobody = Target(target.url, target.model, None)
            return await run_trace(nobody, TRACE, ClientConfig(seed=1))

    with pytest.raises(ConfigurationError, match="does not show its instances"):
        asyncio.run(send())
    assert server.bodies == []


@pytest.mark.slow
@pytest.mark.parametrize(("num_samples", "timeout_s"), [(9, 60.0), (10**9, 1.0)])
def test_the_instances_are_watched_until_they_have_settled_or_the_time_is_up(
    num_samples: int, timeout_s: float
) -> None:
    server = CompletionsServer(instances=[listed()])
    num_asked = 0

    def is_settled(sample: ClusterSample) -> bool:
        nonlocal num_asked
        assert sample.instances[0].id == "i0"
        num_asked += 1
        return num_asked >= num_samples

    async def send() -> ServedRun:
        async with running(server) as target:
            return await run_trace(
                target,
                TRACE,
                ClientConfig(seed=1),
                interval_s=0.01,
                is_settled=is_settled,
                settle_timeout_s=timeout_s,
            )

    done = asyncio.run(send())
    assert done.summary().num_completed == 3
    assert 2 <= num_asked <= num_samples
    assert (num_asked == num_samples) == (num_samples == 9)
    # What comes after the last request is no part of what the run cost.
    assert done.samples[-1].time_s > done.summary().simulated_s


def test_no_request_takes_up_a_connection_that_the_server_may_be_ending() -> None:
    """The third comes when the first two have ended, so that their connections would be idle."""
    server = CompletionsServer()
    run(server)
    assert len(set(server.ports)) == len(server.ports) == 3
