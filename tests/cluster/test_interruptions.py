"""Section 4.2, the handshake: whatever happens in the middle of a migration, the request says
what it would have said anyway, or ends, and neither instance keeps anything of it.

`held` stops a migration at an effect; `pause_at` keeps the request from decoding on meanwhile.
"""

import asyncio
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from sterna.migration.messages import Reason
from tests.cluster.conftest import LEASE_S, Run
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

CUT = 12
NUM_TOKENS = 45
MAX_NUM_SEQS = 16


def build(pair: InstancePair, seed: int = 0, **sampling: Any) -> EngineCoreRequest:
    """A request whose first stage is one of four blocks, and the last one of one or two."""
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8} | sampling
    return pair.build(random_prompt(140, seed=seed), seed=seed, **sampling)


async def start(
    pair: InstancePair, request: EngineCoreRequest, instance_id: str = "i0"
) -> Generated:
    """Run the request up to the cut, and pause it there."""
    await pair.pause_at(request.request_id, instance_id, CUT)
    generated = pair.submit(request, instance_id)
    await generated.until_tokens(CUT)
    return generated


async def occupy(pair: InstancePair, instance_id: str, *num_blocks: int) -> list[str]:
    """Fill blocks of the instance with one paused request for each number; returns their ids."""
    fillers = [
        pair.build(
            random_prompt((num - 1) * 32 + 2, seed=100 + number), max_tokens=28, ignore_eos=True
        )
        for number, num in enumerate(num_blocks)
    ]
    ids = [filler.request_id for filler in fillers]
    # None makes tokens before all are there: a tiny model ends a request within milliseconds.
    await pair.pause_at(ids[0], instance_id, 0)
    await pair.pause_at(ids[-1], instance_id, 1)
    generated = [pair.submit(filler, instance_id) for filler in fillers]
    await pair.until_reported(
        instance_id, lambda load: load.num_running + load.num_queuing == len(ids)
    )
    await pair.unpause(ids[0], instance_id)
    await generated[-1].until_tokens(1)
    return ids


def release(pair: InstancePair, instance_id: str, request_ids: list[str]) -> None:
    for request_id in request_ids:
        pair.abort(request_id, instance_id)


# ------------------------------------------------------------------------------------ finishes


@pytest.mark.parametrize("point", ["Reserve", "CopyBlocks", "Reserve last", "Drain"])
def test_a_request_that_finishes_during_its_migration_stays(
    tiny: InstancePair, run: Run, point: str
) -> None:
    """Section 4.2: "the source instance also checks whether the request being migrated has
    completed or been preempted"."""
    expected = run(tiny.generate(build(tiny)))

    async def finish_at_point() -> Generated:
        request = build(tiny)
        generated = await start(tiny, request)
        async with tiny.held("i0", point) as until_held:
            moving = tiny.begin_move(request.request_id, "i0", "i1")
            await until_held()
            await tiny.unpause(request.request_id, "i0")
            await generated.until_end()
        assert (await tiny.hear(moving)).error in (
            Reason.REQUEST_FINISHED.value,
            Reason.REQUEST_UNKNOWN.value,
        )
        return generated

    assert_same(run(finish_at_point()), expected)
    run(tiny.until_idle())


# -------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("told", ["i0", "i1"])
@pytest.mark.parametrize(
    ("where", "point"),
    [
        ("i0", "CopyBlocks"),
        ("i0", "Reserve last"),
        ("i0", "Drain"),
        ("i0", "CopyBlocks last"),
        ("i0", "Commit"),
        ("i1", "Adopt"),
        ("i1", "Committed"),
        ("i0", "Release"),
    ],
)
def test_a_client_that_goes_during_the_migration_ends_the_request_wherever_it_is(
    tiny: InstancePair, run: Run, where: str, point: str, told: str
) -> None:
    async def abort_at_point() -> Generated:
        request = build(tiny)
        generated = await start(tiny, request)
        await tiny.pause_at(request.request_id, "i1", CUT + 5)
        async with tiny.held(where, point) as until_held:
            moving = tiny.begin_move(request.request_id, "i0", "i1")
            await until_held()
            tiny.abort(request.request_id, told)
            # It answers in order: the abort has arrived.
            await tiny.requests_on(told)
        await tiny.hear(moving)
        await tiny.until_idle()
        return generated

    generated = run(abort_at_point())
    assert generated.finish_reason is None
    assert len(generated.token_ids) < NUM_TOKENS


def test_an_abort_that_comes_after_the_request_has_left_follows_it(
    tiny: InstancePair, run: Run
) -> None:
    async def abort_afterwards() -> Generated:
        request = build(tiny)
        generated = await start(tiny, request)
        await tiny.pause_at(request.request_id, "i1", CUT + 5)
        report = await tiny.move(request.request_id, "i0", "i1")
        assert report["stages"] == 2
        await generated.until_tokens(CUT + 5)
        tiny.abort(request.request_id, "i0")
        await tiny.until_idle()
        return generated

    assert len(run(abort_afterwards()).token_ids) == CUT + 5


# --------------------------------------------------------------------------------- preemptions


@pytest.mark.parametrize("point", ["CopyBlocks", "Reserve last", "Drain"])
@pytest.mark.parametrize("runs_again", [False, True], ids=["queuing", "running_again"])
def test_a_request_that_is_preempted_during_its_migration_stays(
    tiny: InstancePair, run: Run, point: str, runs_again: bool
) -> None:
    """Its blocks are not those any more that were copied, also when it runs again."""
    sampling = {"temperature": 0.8, "seed": 1, "max_tokens": 60, "ignore_eos": True}
    prompt = random_prompt(580, seed=1)
    expected = run(tiny.generate(tiny.build(prompt, **sampling)))

    async def preempt_at_point() -> Generated:
        # Both need a block more after 28 tokens of the younger one, and one block is left.
        older = tiny.build(random_prompt(590, seed=2), max_tokens=300, ignore_eos=True)
        request = tiny.build(prompt, **sampling)
        request_id = request.request_id
        await tiny.submit(older, "i0").until_tokens(1)
        await tiny.pause_at(older.request_id, "i0", 200)
        generated = await start(tiny, request)
        before = tiny.loads["i0"].num_preemptions
        async with tiny.held("i0", point) as until_held:
            moving = tiny.begin_move(request_id, "i0", "i1")
            await until_held()
            await tiny.unpause(request_id, "i0")
            await tiny.until_reported("i0", lambda load: load.num_preemptions > before)
            if runs_again:
                await tiny.pause_at(request_id, "i0", 50)
                tiny.abort(older.request_id, "i0")
                await generated.until_tokens(50)
        assert (await tiny.hear(moving)).error == Reason.REQUEST_PREEMPTED.value
        tiny.abort(older.request_id, "i0")
        await tiny.unpause(request_id, "i0")
        return await generated.until_end()

    assert_same(run(preempt_at_point()), expected)
    run(tiny.until_idle())


# ------------------------------------------------------------------------------------ refusals


def test_a_full_destination_refuses_the_first_stage(tiny: InstancePair, run: Run) -> None:
    expected = run(tiny.generate(build(tiny)))

    async def move_to_full() -> Generated:
        fillers = await occupy(tiny, "i1", 18, 18)
        request = build(tiny)
        generated = await start(tiny, request)
        report = await tiny.move(request.request_id, "i0", "i1")
        assert report["reason"] == Reason.NO_MEMORY.value
        release(tiny, "i1", fillers)
        await tiny.unpause(request.request_id, "i0")
        return await generated.until_end()

    found = run(move_to_full())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    run(tiny.until_idle())


def test_a_refused_last_stage_leaves_the_request_where_it_was(tiny: InstancePair, run: Run) -> None:
    expected = run(tiny.generate(build(tiny)))

    async def fill_before_last_stage() -> Generated:
        request = build(tiny)
        generated = await start(tiny, request)
        async with tiny.held("i0", "Reserve last") as until_held:
            moving = tiny.begin_move(request.request_id, "i0", "i1")
            await until_held()
            # Four of 39 blocks are reserved for the first stage.
            fillers = await occupy(tiny, "i1", 18, 16)
        assert (await tiny.hear(moving)).error == Reason.NO_MEMORY.value
        release(tiny, "i1", fillers)
        await tiny.unpause(request.request_id, "i0")
        return await generated.until_end()

    found = run(fill_before_last_stage())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    run(tiny.until_idle())


def test_a_destination_without_a_batch_slot_refuses(tiny: InstancePair, run: Run) -> None:
    expected = run(tiny.generate(build(tiny)))

    async def move_to_full_batch() -> Generated:
        fillers = await occupy(tiny, "i1", *[1] * MAX_NUM_SEQS)
        request = build(tiny)
        generated = await start(tiny, request)
        report = await tiny.move(request.request_id, "i0", "i1")
        assert report["reason"] == Reason.NO_SLOT.value
        release(tiny, "i1", fillers)
        await tiny.unpause(request.request_id, "i0")
        return await generated.until_end()

    assert_same(run(move_to_full_batch()), expected)
    run(tiny.until_idle())


def test_a_drained_request_whose_migration_fails_finds_its_batch_slot_free(
    tiny: InstancePair, run: Run
) -> None:
    """The destination's lease ends before Commit comes. The source's batch was full, and somebody
    queued; the request comes back before anybody else is admitted."""
    expected = run(tiny.generate(build(tiny)))

    async def come_back() -> Generated:
        fillers = await occupy(tiny, "i0", *[1] * (MAX_NUM_SEQS - 1))
        await tiny.unpause(fillers[-1], "i0")
        for filler in fillers:
            await tiny.pause_at(filler, "i0", 27)
        request = build(tiny)
        generated = tiny.submit(request, "i0")
        await generated.until_tokens(CUT)
        queuing = build(tiny, seed=3)
        async with tiny.held("i0", "Commit") as until_held:
            moving = tiny.begin_move(request.request_id, "i0", "i1")
            await until_held()
            waiting = tiny.submit(queuing, "i0")
            await tiny.until_reported("i0", lambda load: load.num_queuing == 1)
            await tiny.until_idle("i1")
        assert (await tiny.hear(moving)).error is not None
        assert not waiting.token_ids
        release(tiny, "i0", fillers)
        await waiting.until_end()
        return await generated.until_end()

    assert_same(run(come_back()), expected)
    run(tiny.until_idle())


# -------------------------------------------------------------------------------------- leases


@pytest.mark.parametrize("point", ["CopyBlocks", "Reserve last", "Drain", "Commit"])
def test_no_reservation_outlives_its_lease(tiny: InstancePair, run: Run, point: str) -> None:
    """A source that says nothing any more, for whatever reason, loses its reservation; when it
    speaks again, the request goes on where it was.

    That the reservation is given up while the source is held is asserted, and after how long is
    printed: a lease that somebody renewed would never end.
    """
    expected = run(tiny.generate(build(tiny)))

    async def stay_silent() -> tuple[Generated, float]:
        request = build(tiny)
        generated = await start(tiny, request)
        loop = asyncio.get_running_loop()
        async with tiny.held("i0", point) as until_held:
            moving = tiny.begin_move(request.request_id, "i0", "i1")
            await until_held()
            begun_s = loop.time()
            await tiny.until_idle("i1")
            silent_s = loop.time() - begun_s
        assert (await tiny.hear(moving)).error is not None
        await tiny.unpause(request.request_id, "i0")
        return await generated.until_end(), silent_s

    found, silent_s = run(stay_silent())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    print(f"given up after {silent_s:.2f} s, with a lease of {LEASE_S:.0f} s")
    run(tiny.until_idle())


# ---------------------------------------------------------------------------- several at once


@pytest.mark.parametrize("point", ["CopyBlocks", "Drain", "CopyBlocks last"])
def test_two_migrations_that_cross_both_commit(tiny: InstancePair, run: Run, point: str) -> None:
    expected = [run(tiny.generate(build(tiny, seed))) for seed in (1, 2)]

    async def cross() -> list[Generated]:
        requests = [build(tiny, seed) for seed in (1, 2)]
        ends = (("i0", "i1"), ("i1", "i0"))
        found = [
            await start(tiny, request, here)
            for request, (here, _) in zip(requests, ends, strict=True)
        ]
        async with tiny.held("i0", point) as first, tiny.held("i1", point) as second:
            moving = [
                tiny.begin_move(request.request_id, here, there)
                for request, (here, there) in zip(requests, ends, strict=True)
            ]
            await first()
            await second()
        for move in moving:
            assert (await tiny.hear(move)).error is None
        return [await each.until_end() for each in found]

    for found, alone in zip(run(cross()), expected, strict=True):
        assert_same(found, alone)
        assert len(found.moves) == 1
    run(tiny.until_idle())


def test_as_many_requests_as_allowed_move_between_two_instances_at_once(
    tiny: InstancePair, run: Run
) -> None:
    """Four are allowed; all four are in their last stage at the same time, and a fifth has to
    stay."""
    seeds = range(5)
    expected = [run(tiny.generate(build(tiny, seed))) for seed in seeds]

    async def move_all() -> list[Generated]:
        requests = [build(tiny, seed) for seed in seeds]
        found = []
        for request in requests:
            await tiny.pause_at(request.request_id, "i0", NUM_TOKENS - 5)
            found.append(tiny.submit(request, "i0"))
        await asyncio.gather(*(each.until_tokens(CUT) for each in found))
        async with tiny.held("i0", "CopyBlocks last", num_migrations=4) as until_held:
            moving = [tiny.begin_move(each.request_id, "i0", "i1") for each in requests[:4]]
            await until_held()
            fifth = await tiny.move(requests[4].request_id, "i0", "i1")
            assert fifth["reason"] == Reason.BUSY.value
        for move in moving:
            assert (await tiny.hear(move)).error is None
        await tiny.unpause(requests[4].request_id, "i0")
        return [await each.until_end() for each in found]

    for found, alone in zip(run(move_all()), expected, strict=True):
        assert_same(found, alone)
    run(tiny.until_idle())


def test_a_request_does_not_move_on_before_its_last_source_knows_that_it_came(
    tiny: InstancePair, run: Run
) -> None:
    expected = run(tiny.generate(build(tiny)))

    async def bounce() -> Generated:
        request = build(tiny)
        request_id = request.request_id
        generated = await start(tiny, request)
        await tiny.pause_at(request_id, "i1", CUT + 3)
        async with tiny.held("i0", "Release") as until_held:
            moving = tiny.begin_move(request_id, "i0", "i1")
            await until_held()
            await generated.until_tokens(CUT + 3)
            early = await tiny.move(request_id, "i1", "i0")
            assert early["reason"] == Reason.ALREADY_MIGRATING.value
        assert (await tiny.hear(moving)).error is None
        await tiny.pause_at(request_id, "i0", NUM_TOKENS - 5)
        report = await tiny.move(request_id, "i1", "i0")
        assert "stages" in report, report
        await tiny.unpause(request_id, "i0")
        return await generated.until_end()

    found = run(bounce())
    assert_same(found, expected)
    assert found.moves == ["i1", "i0"]
    run(tiny.until_idle())


# ------------------------------------------------------------------------------------- queuing


def test_a_request_that_queues_moves_without_kv(tiny: InstancePair, run: Run) -> None:
    """Never started, it is dispatched again: nothing is copied, and its prompt is computed on the
    destination alone."""
    expected = run(tiny.generate(build(tiny)))

    async def move_queuing() -> Generated:
        fillers = await occupy(tiny, "i0", 19, 18)
        request = build(tiny)
        generated = tiny.submit(request, "i0")
        await tiny.until_reported("i0", lambda load: load.num_queuing == 1)
        report = await tiny.move(request.request_id, "i0", "i1")
        assert report["stages"] == 1
        await generated.until_end()
        release(tiny, "i0", fillers)
        return generated

    found = run(move_queuing())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i1"}
    run(tiny.until_idle())


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 1},
        {"repetition_penalty": 1.2},
        {"structured_outputs": {"regex": r"(\d{3}-[a-z]{5};){20}"}, "seed": 3, "temperature": 0.9},
    ],
    ids=["seeded", "penalty", "regex"],
)
def test_a_preempted_request_that_queues_moves_with_its_history_and_without_kv(
    tiny: InstancePair, run: Run, sampling: dict[str, Any]
) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True} | sampling
    prompt = random_prompt(580, seed=1)
    expected = run(tiny.generate(tiny.build(prompt, **asked)))

    async def move_preempted() -> Generated:
        older = tiny.build(random_prompt(590, seed=2), max_tokens=300, ignore_eos=True)
        request = tiny.build(prompt, **asked)
        await tiny.submit(older, "i0").until_tokens(1)
        await tiny.pause_at(older.request_id, "i0", 200)
        before = tiny.loads["i0"].num_preemptions
        generated = tiny.submit(request, "i0")
        await tiny.until_reported("i0", lambda load: load.num_preemptions > before)
        num_before = len(generated.token_ids)
        assert num_before > 0
        report = await tiny.move(request.request_id, "i0", "i1")
        assert report["stages"] == 1
        await generated.until_end()
        tiny.abort(older.request_id, "i0")
        return generated

    found = run(move_preempted())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0", "i1"}
    run(tiny.until_idle())
