"""Section 4.2, fault tolerance of the handshake: a SIGKILL of either instance at any point.

The victim is an instance of the test's own; the survivor is `i0`. `bury` plays the supervisor,
which confirms a death. Where the only copy of the KV cache died, nothing more comes; that the
client then hears of it is the front end's part.
"""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from sterna.migration.messages import Reason
from sterna.types import InstanceId
from tests.cluster.conftest import LEASE_S, Run
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

CUT = 12
NUM_TOKENS = 45
_numbers = itertools.count()


@pytest.fixture
def victim(tiny: InstancePair, run: Run) -> Iterator[str]:
    """One more instance, to be killed."""
    instance_id = InstanceId(f"victim{next(_numbers)}")
    run(tiny.add_instance(instance_id))
    yield instance_id
    if instance_id in tiny.actors:
        run(tiny.remove(instance_id))
    elif instance_id in tiny.addresses:
        tiny.bury(instance_id)


def build(pair: InstancePair) -> EngineCoreRequest:
    sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return pair.build(random_prompt(140, seed=31), temperature=0.8, seed=9, **sampling)


async def start(pair: InstancePair, instance_id: str) -> tuple[str, Generated]:
    """Run the request on the instance up to the cut, and pause it there."""
    request = build(pair)
    await pair.pause_at(request.request_id, instance_id, CUT)
    generated = pair.submit(request, instance_id)
    await generated.until_tokens(CUT)
    return request.request_id, generated


# ------------------------------------------------------------------- the destination is killed


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True], ids=["at_once", "while_the_source_sends"])
def test_a_destination_killed_in_the_first_stage_costs_nothing(
    tiny: InstancePair, run: Run, victim: str, is_frozen: bool
) -> None:
    """The source finds out by itself: by the connection, or by silence."""
    expected = run(tiny.generate(build(tiny)))

    async def kill() -> Generated:
        request_id, generated = await start(tiny, "i0")
        async with tiny.held("i0", "CopyBlocks") as until_held:
            moving = tiny.begin_move(request_id, "i0", victim)
            await until_held()
            process_id = await tiny.freeze(victim)
            if not is_frozen:
                await tiny.kill(victim, process_id)
        assert (await tiny.hear(moving)).error in (
            Reason.TRANSFER_FAILED.value,
            Reason.PEER_SILENT.value,
        )
        if is_frozen:
            await tiny.kill(victim, process_id)
        await tiny.unpause(request_id, "i0")
        return await generated.until_end()

    found = run(kill())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    run(tiny.until_idle("i0"))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["CopyBlocks last", "Commit"])
def test_a_destination_killed_in_the_last_stage_gives_the_request_back_once_its_death_is_sure(
    tiny: InstancePair, run: Run, victim: str, point: str
) -> None:
    """Silence alone never does: the destination might have committed. The source keeps asking,
    for longer than any lease, and resumes when the supervisor confirms the death."""
    expected = run(tiny.generate(build(tiny)))

    async def kill() -> Generated:
        request_id, generated = await start(tiny, "i0")
        loop = asyncio.get_running_loop()
        async with tiny.held("i0", point) as until_held:
            moving = tiny.begin_move(request_id, "i0", victim)
            await until_held()
            await tiny.kill(victim)
        await tiny.unpause(request_id, "i0")
        begun_s = loop.time()
        while loop.time() < begun_s + 2 * LEASE_S:
            await tiny.until_next_report("i0")
            assert tiny.loads[InstanceId("i0")].num_migrating_out == 1
            assert len(generated.token_ids) == CUT
        tiny.bury(victim)
        assert (await tiny.hear(moving)).error == Reason.PEER_DEAD.value
        return await generated.until_end()

    found = run(kill())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    run(tiny.until_idle("i0"))


def test_a_destination_killed_after_the_commit_and_before_its_verdict_gives_the_request_back(
    tiny: InstancePair, run: Run, victim: str
) -> None:
    expected = run(tiny.generate(build(tiny)))

    async def kill() -> Generated:
        request_id, generated = await start(tiny, "i0")
        async with tiny.held(victim, "Adopt") as until_held:
            moving = tiny.begin_move(request_id, "i0", victim)
            await until_held()
            await tiny.kill(victim)
        await tiny.unpause(request_id, "i0")
        tiny.bury(victim)
        assert (await tiny.hear(moving)).error == Reason.PEER_DEAD.value
        return await generated.until_end()

    found = run(kill())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    run(tiny.until_idle("i0"))


@pytest.mark.slow
def test_a_destination_killed_with_its_verdict_unheard_has_its_tokens_said_again(
    tiny: InstancePair, run: Run, victim: str
) -> None:
    """It had adopted the request and gone on. The source knows nothing of that and says the same
    tokens again from its own copy; the front end drops what the client has."""
    expected = run(tiny.generate(build(tiny)))

    async def kill() -> Generated:
        request_id, generated = await start(tiny, "i0")
        await tiny.pause_at(request_id, victim, CUT + 5)
        async with tiny.held(victim, "Committed") as until_held:
            moving = tiny.begin_move(request_id, "i0", victim)
            await until_held()
            await generated.until_tokens(CUT + 5)
            await tiny.kill(victim)
        await tiny.unpause(request_id, "i0")
        tiny.bury(victim)
        assert (await tiny.hear(moving)).error == Reason.PEER_DEAD.value
        return await generated.until_end()

    found = run(kill())
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    assert found.num_repeated == 5
    run(tiny.until_idle("i0"))


@pytest.mark.slow
def test_a_destination_killed_after_the_source_has_let_go_takes_the_request_along(
    tiny: InstancePair, run: Run, victim: str
) -> None:
    async def kill() -> Generated:
        request_id, generated = await start(tiny, "i0")
        await tiny.pause_at(request_id, victim, CUT + 5)
        report = await tiny.move(request_id, "i0", victim)
        assert report["stages"] == 2
        await generated.until_tokens(CUT + 5)
        await tiny.kill(victim)
        tiny.bury(victim)
        await tiny.until_idle("i0")
        return generated

    found = run(kill())
    assert len(found.token_ids) == CUT + 5
    assert found.finish_reason is None


# ------------------------------------------------------------------------ the source is killed


@pytest.mark.slow
@pytest.mark.parametrize("is_buried", [True, False], ids=["confirmed", "not_confirmed"])
@pytest.mark.parametrize("point", ["CopyBlocks", "Reserve last", "CopyBlocks last", "Commit"])
def test_a_source_killed_before_the_commit_leaves_nothing_on_the_destination(
    tiny: InstancePair, run: Run, victim: str, point: str, is_buried: bool
) -> None:
    """Confirmed or not: the lease ends by itself. After how long is printed."""

    async def kill() -> tuple[Generated, float]:
        request_id, generated = await start(tiny, victim)
        loop = asyncio.get_running_loop()
        async with tiny.held(victim, point) as until_held:
            tiny.begin_move(request_id, victim, "i0")
            await until_held()
            begun_s = loop.time()
            await tiny.kill(victim)
        if is_buried:
            tiny.bury(victim)
        await tiny.until_idle("i0")
        return generated, loop.time() - begun_s

    found, freed_s = run(kill())
    assert len(found.token_ids) == CUT
    assert found.finish_reason is None
    print(f"freed after {freed_s:.2f} s, with a lease of {LEASE_S:.0f} s")


@pytest.mark.parametrize("is_buried_first", [False, True], ids=["unknown", "confirmed_first"])
def test_a_source_killed_after_the_commit_is_not_missed(
    tiny: InstancePair, run: Run, victim: str, is_buried_first: bool
) -> None:
    """The destination has everything: it adopts the request, whether it knows of the death or
    not, and remembers the verdict until the death is confirmed."""
    expected = run(tiny.generate(build(tiny)))

    async def kill() -> Generated:
        request_id, generated = await start(tiny, victim)
        async with tiny.held("i0", "Adopt") as until_held:
            tiny.begin_move(request_id, victim, "i0")
            await until_held()
            await tiny.kill(victim)
            if is_buried_first:
                tiny.bury(victim)
                # It answers in order: it has heard of the death.
                await tiny.requests_on("i0")
        await generated.until_end()
        if not is_buried_first:
            tiny.bury(victim)
        return generated

    found = run(kill())
    assert_same(found, expected)
    assert found.moves == ["i0"]
    run(tiny.until_idle("i0"))


@pytest.mark.slow
def test_a_source_killed_before_it_heard_the_verdict_is_not_missed(
    tiny: InstancePair, run: Run, victim: str
) -> None:
    expected = run(tiny.generate(build(tiny)))

    async def kill() -> Generated:
        request_id, generated = await start(tiny, victim)
        async with tiny.held(victim, "Release") as until_held:
            tiny.begin_move(request_id, victim, "i0")
            await until_held()
            await tiny.kill(victim)
        await generated.until_end()
        tiny.bury(victim)
        return generated

    found = run(kill())
    assert_same(found, expected)
    assert set(found.origins.values()) == {victim, "i0"}
    run(tiny.until_idle("i0"))
