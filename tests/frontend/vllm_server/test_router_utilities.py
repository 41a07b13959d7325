"""Calls of vLLM's engine-core client that are no requests: which instances answer them, and how."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import UtilityOutput
from vllm.v1.serial_utils import MsgpackEncoder

from sterna.engine.payload_parts import pack_frames
from sterna.engine.vllm.payload import decode_outputs, encode_utility_result
from sterna.frontend.vllm_server.utility_calls import Utilities
from sterna.messages.actors import CallUtility, Membership, UtilityResult
from tests.clocks import SkippingLoop, run_skipping, stands
from tests.frontend.scripted import ME
from tests.frontend.vllm_server.routed import World, in_worlds_of

pytestmark = pytest.mark.vllm

A_DAY_S = 86_400.0
ADAPTER = ("french", 1, "/adapters/french")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a test's coroutine in a world of its own."""
    return in_worlds_of(tmp_path)


def test_a_utility_call_that_changes_state_reaches_every_instance(run):
    async def test(world: World) -> None:
        world.cluster.i0.utility_results["reset_prefix_cache"] = True
        world.cluster.i1.utility_results["reset_prefix_cache"] = True
        assert (await world.client.call("reset_prefix_cache", True, False)).result.result is True
        world.cluster.i1.utility_results["reset_prefix_cache"] = False
        assert (await world.client.call("reset_prefix_cache", True, False)).result.result is False

    run(test)


def test_each_instance_gets_its_place_among_those_that_are_called(run):
    """Ranks of two instances would else be the same ones of a trainer's group, which never comes
    together."""

    async def test(world: World) -> None:
        calling = asyncio.create_task(
            world.client.call("collective_rpc", "init_weight_transfer_engine", None, (), {})
        )
        places = []
        for each in (world.cluster.i0, world.cluster.i1):
            message, _ = await each.get(CallUtility)
            places.append(message.place)
            result = encode_utility_result(message.call_id, [None])
            each.send(UtilityResult(each.instance_id, message.call_id), [result])
        assert (await calling).result.result == [None, None]
        assert places == [0, 1]

    run(test)


def test_results_of_all_workers_come_in_the_order_of_the_instances(run):
    async def test(world: World) -> None:
        world.cluster.i0.utility_results["collective_rpc"] = ["a", "b"]
        world.cluster.i1.utility_results["collective_rpc"] = ["c", "d"]
        output = await world.client.call("collective_rpc", "method", None, (), None)
        assert output.result.result == ["a", "b", "c", "d"]

    run(test)


@pytest.mark.parametrize("is_silent", [False, True])
def test_of_what_is_the_same_everywhere_the_first_answer_counts(run, is_silent: bool):
    """A front end starts although an instance is in a step of a minute, hangs, or dies."""

    async def test(world: World) -> None:
        if is_silent:
            del world.cluster.i0.utility_results["get_supported_tasks"]
        else:
            world.cluster.i0.utility_results["get_supported_tasks"] = RuntimeError("dead")
        output = await world.client.call("get_supported_tasks")
        assert output.result.result == ["generate"]
        world.cluster.i1.utility_results["get_supported_tasks"] = RuntimeError("dead too")
        if not is_silent:
            output = await world.client.call("get_supported_tasks")
            assert "dead" in output.failure_message

    run(test)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_front_end_starts_although_an_instance_does_not_load_an_adapter(run, is_silent: bool):
    """With --lora-modules the API stayed down when one instance hung, or lacked the folder."""

    async def test(world: World) -> None:
        world.cluster.i1.utility_results["add_lora"] = True
        if not is_silent:
            world.cluster.i0.utility_results["add_lora"] = RuntimeError("no such folder")
        assert (await world.client.call("add_lora", ADAPTER)).result.result is True
        if is_silent:
            # It was asked as well, and has the adapter when it goes on.
            await world.cluster.i0.get(CallUtility)

    run(test)


def test_a_front_end_does_not_start_with_an_adapter_that_no_instance_can_load(run):
    async def test(world: World) -> None:
        for each in (world.cluster.i0, world.cluster.i1):
            each.utility_results["add_lora"] = RuntimeError("no such folder")
        output = await world.client.call("add_lora", ADAPTER)
        assert "no such folder" in output.failure_message

    run(test)


def test_an_adapter_that_a_caller_loads_must_load_on_every_instance(run):
    """Success means, as in vLLM, that requests can use it, wherever they go."""

    async def test(world: World) -> None:
        world.router.utilities.is_starting = False
        world.cluster.i0.utility_results["add_lora"] = True
        world.cluster.i1.utility_results["add_lora"] = RuntimeError("no such folder")
        output = await world.client.call("add_lora", ADAPTER)
        assert output.failure_message == "instance i1: no such folder"

    run(test)


def test_what_one_instance_is_to_carry_out_goes_to_one(run):
    async def test(world: World) -> None:
        world.cluster.i0.utility_results["save_sharded_state"] = None
        world.cluster.i1.utility_results["save_sharded_state"] = RuntimeError("not asked")
        output = await world.client.call("save_sharded_state", "folder", None, None)
        assert output.failure_message is None

    run(test)


def test_a_failing_utility_call_says_where_and_why(run):
    async def test(world: World) -> None:
        world.cluster.i0.utility_results["profile"] = None
        world.cluster.i1.utility_results["profile"] = RuntimeError("no trace")
        output = await world.client.call("profile", True)
        assert output.failure_message == "instance i1: no trace"

    run(test)


def test_instances_that_disagree_fail_the_call(run):
    async def test(world: World) -> None:
        world.cluster.i0.utility_results["is_sleeping"] = True
        world.cluster.i1.utility_results["is_sleeping"] = False
        output = await world.client.call("is_sleeping")
        assert "answer is_sleeping differently" in output.failure_message

    run(test)


@pytest.mark.parametrize(
    "method", ["reinitialize_distributed", "shutdown", "__init__", "sleep", "pause_scheduler"]
)
def test_an_unknown_utility_call_is_answered_with_a_failure(run, method: str):
    async def test(world: World) -> None:
        output = await world.client.call(method)
        assert "cannot be called" in output.failure_message

    run(test)


def test_a_utility_call_without_instances_is_answered_with_a_failure(run):
    async def test(world: World) -> None:
        world.router.on_membership(Membership(99, (), (), None))
        output = await world.client.call("reset_prefix_cache", False, False)
        assert "there is no instance" in output.failure_message

    run(test)


def test_a_utility_call_on_an_instance_that_dies_is_answered_with_a_failure(run):
    async def test(world: World) -> None:
        calling = asyncio.create_task(world.client.call("profile", True))
        await world.cluster.i1.get(CallUtility)
        world.cluster.announce(world.cluster.i0)
        assert "instance i1 died" in (await calling).failure_message

    run(test)


def test_a_utility_call_that_is_too_large_to_be_sent_is_answered_with_a_failure():
    async def test() -> None:
        peers = SimpleNamespace(instances=("i0",), send_to_instance=lambda *_: False)
        output = await answered(Utilities(ME, peers))
        assert "instance i0 cannot be sent the call of profile" in output.failure_message

    asyncio.run(test())


def test_a_utility_call_may_take_any_time():
    """The end of a profile, or an update of weights, takes minutes; vLLM has no limit either."""
    sent: asyncio.Queue[int] = asyncio.Queue()

    def send(instance_id: str, message: CallUtility, frames: object) -> bool:
        sent.put_nowait(message.call_id)
        return True

    async def test(loop: SkippingLoop) -> None:
        utilities = Utilities(ME, SimpleNamespace(instances=("i0",), send_to_instance=send))
        calling = asyncio.create_task(answered(utilities))
        call_id = await sent.get()
        loop.skipped_s += A_DAY_S
        for _ in range(10):
            await asyncio.sleep(0)
        utilities.on_result(call_id, encode_utility_result(call_id, True))
        output = await calling
        assert (output.failure_message, output.result.result) == (None, True)

    run_skipping(test, stands)


async def answered(utilities: Utilities) -> UtilityOutput:
    call = pack_frames(MsgpackEncoder().encode((0, 5, "profile", (False,))))
    output = decode_outputs(await utilities.answer(call)).utility_output
    assert output is not None
    return output
