"""The router towards vLLM's engine-core client: its sockets and its requests."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec import structs
from prometheus_client import REGISTRY, CollectorRegistry

pytest.importorskip("vllm")

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.serial_utils import MsgpackEncoder

from sterna.cli.operate.explain_text import explained
from sterna.config import OnInstanceFailure
from sterna.dashboard.decisions import line_of
from sterna.engine.vllm.payload import decode_request
from sterna.frontend.metrics.latencies import Latency
from sterna.frontend.metrics.prometheus import FrontendMetrics
from sterna.frontend.requests.request_effects import Failure
from sterna.frontend.resumable.exchange import StreamExchange
from sterna.frontend.resumable.pacing import Begun
from sterna.frontend.vllm_server import router as router_module
from sterna.frontend.vllm_server.router import Router
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    AdminReply,
    CancelDispatch,
    ClusterStats,
    DescribeHistory,
    FrontendMember,
    HandedBack,
    Heartbeat,
    InstanceStats,
    Membership,
    MigrationEnd,
    OwnerQuery,
    frontend_name,
)
from sterna.messaging.mailbox import Mailbox
from sterna.messaging.reliable_channel import SendingEnd
from sterna.types import HIGH, NORMAL, FrontendId, InstanceId, RequestId
from tests.frontend.scripted import ME, Actor, ready, within
from tests.frontend.vllm_server.routed import CONFIG, Client, World, in_worlds_of, world

pytestmark = pytest.mark.vllm

ABORT = OnInstanceFailure.ABORT


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a test's coroutine in a world of its own."""
    return in_worlds_of(tmp_path)


def request(
    request_id: str = "r1", num_prompt_tokens: int = 33, **fields: Any
) -> EngineCoreRequest:
    fields.setdefault("sampling_params", SamplingParams(max_tokens=5))
    fields.setdefault("pooling_params", None)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        mm_features=None,
        arrival_time=12.5,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **fields,
    )


def test_the_client_hears_from_its_engine_although_it_binds_later(tmp_path: Path):
    async def test() -> None:
        mailbox = Mailbox("127.0.0.1")
        router = Router(ME, CONFIG, mailbox, ready(block_size=64), tmp_path)
        client = Client(router.client_addresses)
        assert (await client.ready()).block_size == 64
        client.close()
        router.close()
        mailbox.close()

    asyncio.run(within(test()))


def test_a_request_is_dispatched_by_its_demand_and_priority_and_sent_untouched(run):
    async def test(world: World) -> None:
        sent = request(num_prompt_tokens=33, priority=-1)
        await world.client.add(sent)
        message, (payload,) = await world.cluster.i0.get(AddRequest)
        assert message == AddRequest(ME, RequestId("r1"), 1)
        assert payload == bytes(MsgpackEncoder().encode(sent)[0])
        (ask,) = world.cluster.scheduler.asked
        assert (ask.frontend_id, ask.request_id, ask.arrival_s) == (ME, "r1", 12.5)
        assert ask.demand_tokens == 64
        assert (ask.scheduling_priority, ask.execution_priority) == (HIGH, HIGH)

    run(test, scheduler_timeout_s=30.0)


def test_the_supervisor_hears_that_everything_of_its_loop_gets_its_turn(run):
    async def test(world: World) -> None:
        supervisor = Actor(world.router.peers.own_address)
        supervisor.send(Membership(99, (), (), None, supervisor=supervisor.mailbox.address))
        try:
            for _ in range(2):
                beat, _ = await supervisor.get(Heartbeat)
                assert beat == Heartbeat(frontend_name(ME), 0, is_busy=False)
        finally:
            supervisor.close()

    run(test)


def test_deadlines_that_are_over_when_they_are_set_break_nothing(tmp_path: Path):
    """An overloaded front end has them. Ray's actors run on uvloop, whose timers differ."""

    async def test() -> None:
        config = replace(CONFIG, scheduler_timeout_s=1e-9, scheduler_retry_s=1e-9)
        async with world(tmp_path, config) as each:
            each.cluster.scheduler.target = None
            for number in range(100):
                await each.client.add(request(f"r{number}"))
                each.cluster.announce(each.cluster.i0, each.cluster.i1)
            for _ in range(50):
                # The local rule gives each of the two its half.
                await each.cluster.i0.get(AddRequest)
                await each.cluster.i1.get(AddRequest)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(within(test()))


def test_the_scheduler_is_told_the_session(run):
    async def test(world: World) -> None:
        await world.client.add(request("r1"))
        await world.client.add(request("r2", session_id="abc"))
        await world.cluster.i0.get(AddRequest)
        await world.cluster.i0.get(AddRequest)
        asked = {each.request_id: each.session for each in world.cluster.scheduler.asked}
        assert asked == {"r1": "", "r2": "abc"}

    run(test, scheduler_timeout_s=30.0)


def test_a_request_without_a_priority_is_normal(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get(AddRequest)
        assert world.cluster.scheduler.asked[0].execution_priority == NORMAL

    run(test, scheduler_timeout_s=30.0)


def test_a_silent_scheduler_is_bypassed(run):
    async def test(world: World) -> None:
        world.cluster.scheduler.target = None
        await world.client.add(request())
        message, _ = await world.cluster.i0.get(AddRequest)
        assert message.dispatch_number == 0
        await world.cluster.scheduler.get(CancelDispatch)

    run(test)


def test_what_came_while_the_loop_stood_still_is_no_silence(run, monkeypatch):
    """As after a large body: the scheduler's answer lies unread when the time for it is over."""

    async def test(world: World) -> None:
        scheduler = world.cluster.scheduler
        answer = scheduler.send

        def answer_and_stall(message: Any) -> None:
            answer(message)
            # The front end is in the same loop.
            time.sleep(3.5)

        scheduler.send = answer_and_stall
        await world.client.add(request())
        message, _ = await world.cluster.i0.get(AddRequest)
        assert message.dispatch_number == 1, "the scheduler's answer, not the local rule"

    # A slow machine may take as long for the answer's way.
    monkeypatch.setattr("sterna.frontend.vllm_server.router.STALL_S", 1.0)
    run(test, scheduler_timeout_s=2.0)


def test_tokens_reach_the_client_in_order_and_once_over_a_move(run):
    async def test(world: World) -> None:
        i0, i1 = world.cluster.i0, world.cluster.i1
        await world.client.add(request())
        await i0.get_request()
        i1.send_moved("r1", 1)
        i1.send_tokens("r1", 1, [11, 12])
        i1.send_tokens("r1", 3, [13], FinishReason.LENGTH)
        i0.send_tokens("r1", 0, [10])
        received: list[EngineCoreOutput] = []
        while len(received) < 3:
            # Those that waited for the first one may come together with it.
            received += (await world.client.receive()).outputs
        assert [output.new_token_ids for output in received] == [[10], [11, 12], [13]]
        assert received[-1].finish_reason == FinishReason.LENGTH

    run(test, gap_timeout_s=30.0)


def test_a_partly_repeated_output_is_cut(run):
    async def test(world: World) -> None:
        i0 = world.cluster.i0
        await world.client.add(request())
        await i0.get_request()
        i0.send_tokens("r1", 0, [10, 11])
        i0.send_tokens("r1", 1, [11, 12])
        await world.client.receive()
        assert (await world.client.receive_output()).new_token_ids == [12]

    run(test)


def test_an_abort_follows_the_request_to_where_it_moved(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.i1.send_moved("r1", 0)
        world.cluster.i1.send_tokens("r1", 0, [10])
        await world.client.receive()
        await world.client.send(EngineCoreRequestType.ABORT, ["r1"])
        message, _ = await world.cluster.i1.get(AbortRequests)
        assert message.request_ids == ("r1",)

    run(test)


async def history_of(world: World, name: str) -> dict[str, Any]:
    """The history of a request, after all that i0 has sent of it."""
    i0 = world.cluster.i0
    i0.send(DescribeHistory(i0.mailbox.address, 1, name))
    reply, _ = await i0.get(AdminReply)
    (history,) = json.loads(reply.body)
    return history


def test_an_answer_that_ends_at_a_stop_string_has_finished(run):
    """The client's engine finds the string, and aborts the request. No client has left."""

    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.i0.send_tokens("r1", 0, [10, 11])
        await world.client.receive()
        await world.client.send(EngineCoreRequestType.ABORT, ["r1"])
        await world.cluster.i0.get(AbortRequests)
        history = await history_of(world, "r1")
        assert (history["state"], history["output_tokens"]) == ("finished", 2)
        observed = world.router._latencies.take()
        first_token_s = observed[Latency.FIRST_TOKEN, "normal"]
        assert observed[Latency.REQUEST, "normal"] == first_token_s

    run(test)


def test_of_a_request_that_is_handed_back_no_text_says_that_its_instance_died(run):
    """As an instance does that is to end, and whose time is over."""

    async def test(world: World) -> None:
        i0 = world.cluster.i0
        await world.client.add(request())
        await i0.get_request()
        i0.send(HandedBack(InstanceId("i0"), (RequestId("r1"),)))
        history = await history_of(world, "r1")
        (event,) = (each for each in history["events"] if each["event"] == "lost")
        (_, *sentence) = explained({**history, "events": [event]}).split("s  ")
        assert sentence == ["sent again, behind the 0 tokens that its client has"]
        assert line_of(event) == "sent again behind 0 tokens"

    run(test, scheduler_timeout_s=30.0)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_request_whose_client_has_left_is_aborted(run, has_tokens: bool):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        if has_tokens:
            world.cluster.i0.send_tokens("r1", 0, [10, 11])
            await world.client.receive()
        world.router.on_clients_left([RequestId("r1")])
        await world.client.send(EngineCoreRequestType.ABORT, ["r1"])
        await world.cluster.i0.get(AbortRequests)
        assert (await history_of(world, "r1"))["state"] == "aborted"
        assert (Latency.REQUEST, "normal") not in world.router._latencies.take()

    run(test)


def test_a_request_whose_client_leaves_before_it_arrives_here_is_aborted(run):
    async def test(world: World) -> None:
        world.router.on_clients_left([RequestId("r1")])
        await world.client.add(request())
        await world.client.send(EngineCoreRequestType.ABORT, ["r1"])
        await world.client.add(request("r2"))
        while (await world.cluster.i0.get_request()).request_id != "r2":
            pass
        assert (await history_of(world, "r1"))["state"] == "aborted"
        assert (Latency.REQUEST, "normal") not in world.router._latencies.take()

    run(test)


def test_an_instance_that_steps_a_request_nobody_waits_for_is_told_to_stop(run):
    async def test(world: World) -> None:
        world.cluster.i1.send_tokens("gone", 4, [10])
        message, _ = await world.cluster.i1.get(AbortRequests)
        assert message.request_ids == ("gone",)

    run(test)


def test_a_request_that_dies_with_its_instance_goes_on_behind_what_its_client_has(run):
    async def test(world: World) -> None:
        i0, i1 = world.cluster.i0, world.cluster.i1
        await world.client.add(request(num_prompt_tokens=33))
        await i0.get_request()
        i0.send_tokens("r1", 0, [10, 11])
        await world.client.receive()
        world.cluster.announce(i1)
        message, (payload,) = await i1.get(AddRequest)
        assert message.output_token_ids == (10, 11)
        sent = decode_request(payload)
        assert sent.request_id == message.request_id == "r1+1"
        assert sent.prompt_token_ids == list(range(33))
        # Of the attempt that died, not of the one that counts.
        i0.send_tokens("r1", 2, [99])
        i1.send_tokens("r1+1", 2, [12], FinishReason.LENGTH)
        output = await world.client.receive_output()
        assert (output.request_id, output.new_token_ids) == ("r1", [12])
        assert output.finish_reason == FinishReason.LENGTH

    run(test)


def test_a_preemption_counts_unless_it_is_of_an_attempt_that_was_given_up(run):
    async def test(world: World) -> None:
        i0, i1 = world.cluster.i0, world.cluster.i1
        preempted = [
            EngineCoreEvent.new_event(each)
            for each in (EngineCoreEventType.PREEMPTED, EngineCoreEventType.SCHEDULED)
        ]
        tern = "cmpl-tern-0-9f86d081"
        await world.client.add(request(tern))
        await i0.get_request()
        i0.send_tokens(tern, 0, [10])
        i0.send_tokens(tern, 1, [11], events=preempted)
        for _ in range(2):
            await world.client.receive()
        world.cluster.announce(i1)
        await i1.get_request()
        i0.send_tokens(tern, 2, [99], events=preempted)
        i1.send_tokens(f"{tern}+1", 2, [12])
        await world.client.receive()
        kinds = [each["event"] for each in (await history_of(world, "tern"))["events"]]
        assert (kinds.count("preempted"), kinds.count("resumed")) == (1, 1)
        assert len(world.router._latencies.take()[Latency.PREEMPTION, "normal"]) == 1

    run(test)


def test_an_abort_reaches_the_attempt_that_counts(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.announce(world.cluster.i1)
        await world.cluster.i1.get_request()
        await world.client.send(EngineCoreRequestType.ABORT, ["r1"])
        message, _ = await world.cluster.i1.get(AbortRequests)
        assert message.request_ids == ("r1+1",)

    run(test)


def test_where_nothing_is_continued_a_request_that_dies_with_its_instance_ends_with_an_error(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.announce(world.cluster.i1)
        output = await world.client.receive_output()
        why = Failure.OWNER_DIED.value
        assert output == EngineCoreOutput(
            "r1", [], finish_reason=FinishReason.ERROR, stop_reason=why
        )

    run(test, on_instance_failure=ABORT)


def test_a_pooling_request_fails_in_the_one_way_that_vllm_knows(run):
    async def test(world: World) -> None:
        await world.client.add(request(sampling_params=None, pooling_params=PoolingParams()))
        await world.cluster.i0.get_request()
        world.cluster.announce(world.cluster.i1)
        output = await world.client.receive_output()
        assert output.finish_reason == FinishReason.ERROR
        assert output.mm_cache_miss_hashes

    run(test, on_instance_failure=ABORT)


def test_a_pooling_request_that_dies_with_its_instance_is_sent_again(run):
    async def test(world: World) -> None:
        await world.client.add(request(sampling_params=None, pooling_params=PoolingParams()))
        await world.cluster.i0.get_request()
        world.cluster.announce(world.cluster.i1)
        assert (await world.cluster.i1.get_request()).pooling_params == PoolingParams()

    run(test)


def test_a_request_that_was_adopted_before_its_instance_died_goes_on(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.i0.send_tokens("r1", 0, [10])
        await world.client.receive()
        world.cluster.i1.arriving.add(RequestId("r1"))
        world.cluster.announce(world.cluster.i1)
        # It may never get there, and so is asked for again.
        await world.cluster.i1.get(OwnerQuery)
        await world.cluster.i1.get(OwnerQuery)
        world.cluster.i1.send_moved("r1", 1)
        world.cluster.i1.send_tokens("r1", 1, [11], FinishReason.LENGTH)
        assert (await world.client.receive_output()).new_token_ids == [11]

    run(test)


def test_a_request_whose_tokens_got_lost_is_aborted_and_goes_on_behind_those_that_came(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.i0.send_tokens("r1", 0, [10])
        world.cluster.i0.send_tokens("r1", 2, [12])
        message, _ = await world.cluster.i0.get(AddRequest)
        assert (message.request_id, message.output_token_ids) == ("r1+1", (10,))
        message, _ = await world.cluster.i0.get(AbortRequests)
        assert message.request_ids == ("r1",)

    run(test)


def test_where_nothing_is_continued_a_request_whose_tokens_got_lost_ends_with_an_error(run):
    async def test(world: World) -> None:
        await world.client.add(request())
        await world.cluster.i0.get_request()
        world.cluster.i0.send_tokens("r1", 1, [11])
        output = await world.client.receive_output()
        assert (output.request_id, output.finish_reason) == ("r1", FinishReason.ERROR)
        message, _ = await world.cluster.i0.get(AbortRequests)
        assert message.request_ids == ("r1",)

    run(test, on_instance_failure=ABORT)


def test_a_request_that_is_too_large_for_a_message_fails(run, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_FRAME_BYTES", 1000)

    async def test(world: World) -> None:
        await world.client.add(request("large", 1000))
        output = await world.client.receive_output()
        assert (output.request_id, output.finish_reason) == ("large", FinishReason.ERROR)
        await world.client.add(request("small"))
        assert (await world.cluster.i0.get_request()).request_id == "small"

    run(test)


def test_a_request_that_its_instance_does_not_take_fails(run, monkeypatch):
    """It does not read, and what is kept for it is as much as may be."""

    async def test(world: World) -> None:
        monkeypatch.setattr(SendingEnd, "send", lambda *_: None)
        await world.client.add(request())
        assert (await world.client.receive_output()).finish_reason == FinishReason.ERROR

    run(test)


def test_a_request_that_vllms_server_has_rejected_already_goes_nowhere(run):
    """With a KV connector, vLLM's server sends it for the connector's clean-up. It gets no end."""

    async def test(world: World) -> None:
        await world.client.add(request("rejected", abort_immediately=True))
        await world.client.add(request("taken"))
        assert (await world.cluster.i0.get_request()).request_id == "taken"
        assert [each.request_id for each in world.cluster.scheduler.asked] == ["taken"]

    run(test, scheduler_timeout_s=30.0)


def test_a_request_with_streamed_input_is_refused(run):
    async def test(world: World) -> None:
        await world.client.add(request("streamed", resumable=True))
        assert (await world.client.receive_output()).finish_reason == FinishReason.ERROR
        # The rest of its input, and the end mark, which vLLM's client may have sent meanwhile.
        await world.client.add(request("streamed", resumable=True))
        await world.client.add(request("streamed", 1))
        await world.client.add(request("whole"))
        assert (await world.cluster.i0.get_request()).request_id == "whole"
        assert [each.request_id for each in world.cluster.scheduler.asked] == ["whole"]

    run(test, scheduler_timeout_s=30.0)


@pytest.mark.parametrize(
    "is_over",
    [
        lambda client: client.add(request(num_prompt_tokens=1)),
        lambda client: client.send(EngineCoreRequestType.ABORT, ["r1"]),
    ],
    ids=["end mark", "abort"],
)
def test_a_refused_streamed_input_is_forgotten_with_its_last_message(run, is_over):
    async def test(world: World) -> None:
        await world.client.add(request(resumable=True))
        await is_over(world.client)
        await world.client.add(request())
        assert (await world.cluster.i0.get_request()).request_id == "r1"
        assert len(world.cluster.scheduler.asked) == 1

    run(test, scheduler_timeout_s=30.0)


def test_without_a_scheduler_latencies_do_not_pile_up(run, monkeypatch):
    registry = CollectorRegistry()
    monkeypatch.setattr(router_module, "FrontendMetrics", partial(FrontendMetrics, registry))
    monkeypatch.setattr(router_module, "MAX_UNSHOWN_LATENCIES", 100)

    async def test(world: World) -> None:
        world.cluster.announce(world.cluster.i0, has_scheduler=False)
        await world.client.add(request())
        await world.cluster.i0.get_request()
        for index in range(200):
            world.cluster.i0.send_tokens("r1", index, [10])
        num_received = 0
        while num_received < 200:
            num_received += len((await world.client.receive()).outputs)
        supervisor = Actor(world.router.peers.own_address)
        before = world.router.peers.membership
        address = supervisor.mailbox.address
        world.router.on_membership(
            structs.replace(before, version=before.version + 1, supervisor=address)
        )
        try:
            await supervisor.get(Heartbeat)
        finally:
            supervisor.close()
        name, labels = "sterna_inter_token_latency_seconds_count", {"class": "normal"}
        assert registry.get_sample_value(name, labels) == 199
        assert world.router._latencies.num_observed == 0

    run(test)


class Takeover(StreamExchange):
    """An exchange for which r2 goes on behind two tokens, from a front end that has died."""

    def on_begun(self, request_id: RequestId) -> Begun | None:
        return Begun((10, 11), has_ended=False) if request_id == "r2" else None


def test_a_stream_that_is_taken_over_counts_as_one_request(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end that has died has counted it."""
    registry = CollectorRegistry()
    monkeypatch.setattr(router_module, "FrontendMetrics", partial(FrontendMetrics, registry))

    async def test(world: World) -> None:
        world.router.streams = Takeover(ME, 1 << 20, world.router.peers.send_to_frontend, print)
        for request_id in ("r1", "r2"):
            await world.client.add(request(request_id))
            await world.cluster.i0.get_request()
        world.cluster.scheduler.send(ClusterStats(()))
        await world.client.receive()
        assert registry.get_sample_value("sterna_requests_total", {"class": "normal"}) == 1

    run(test)


def test_the_instances_of_the_newest_membership_are_counted(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are wanted too, of which one may never start."""
    registry = CollectorRegistry()
    monkeypatch.setattr(router_module, "FrontendMetrics", partial(FrontendMetrics, registry))

    async def test(world: World) -> None:
        def announce(num_wanted: int) -> None:
            before = world.router.peers.membership
            world.router.on_membership(
                structs.replace(before, version=before.version + 1, num_wanted=num_wanted)
            )

        def shown() -> list[float | None]:
            running = registry.get_sample_value("sterna_instances", {"state": "running"})
            return [registry.get_sample_value("sterna_wanted_instances"), running]

        # The metrics are made with the first report of the scheduler.
        announce(4)
        world.cluster.scheduler.send(ClusterStats(()))
        await world.client.receive()
        assert shown() == [4, 2]
        announce(3)
        assert shown() == [3, 2]

    run(test)


def test_one_front_end_counts_for_all(run: Callable[..., None]) -> None:
    """The counters of all front ends are added up."""

    async def test(world: World) -> None:
        async def counted(num_tokens: int, num_hits: int, *frontends: int) -> list[int]:
            members = (FrontendMember(FrontendId(each), "tcp://127.0.0.1:1") for each in frontends)
            before = world.router.peers.membership
            world.router.on_membership(
                structs.replace(before, version=before.version + 1, frontends=tuple(members))
            )
            stats = InstanceStats(
                *(InstanceId("i0"), 0, 0, 0, 1000, 0.0, 0, 0),
                num_prefix_tokens=num_tokens,
                num_prefix_hits=num_hits,
                external_counts=(num_tokens // 2, num_hits // 2),
                draft_counts=(num_tokens, num_hits),
            )
            ended = MigrationEnd("committed", 2, 0.01, "balance")
            world.cluster.scheduler.send(ClusterStats((stats,), migrations=(ended,)))
            shown = (await world.client.receive()).scheduler_stats
            caches = shown.prefix_cache_stats, shown.connector_prefix_cache_stats
            counts = [count for each in caches for count in (each.queries, each.hits)]
            drafts = shown.spec_decoding_stats
            return counts + ([drafts.num_drafts, drafts.num_draft_tokens] if drafts else [])

        # A predecessor may have counted what is there at first.
        assert await counted(96, 64, 7, 8) == [0, 0, 0, 0, 0, 0]
        assert await counted(106, 70, 7, 8) == [10, 6, 5, 3, 10, 6]
        assert await counted(196, 128, 6, 7) == [0, 0, 0, 0]
        # The other one is gone: what it counted is not counted again.
        assert await counted(200, 130, 7) == [4, 2, 2, 1, 4, 2]
        labels = {"outcome": "committed", "cause": "balance"}
        moved = REGISTRY.get_sample_value("sterna_migrations_total", labels)
        assert moved == 3

    run(test)
