"""Room for a request that waits, as Sterna's scheduler sees it, beside what vLLM then admits.

The room is that of a load report between two steps. It is exact for a step in which no request
begins a block: a prompt whose demand is within it is in the batch then, and one of a block more is
not. Where it is not exact, the name of the test says so.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from sterna.engine.drains import Left
from sterna.migration.messages import Drain, Mode
from sterna.policy.candidate_table import CandidateTable
from sterna.policy.presets import ROUND_ROBIN
from sterna.scheduler.global_scheduler import Dispatch, Effect, GlobalScheduler
from sterna.scheduler.room import Room
from sterna.types import InstanceId, InstanceView, MigrationId, RequestId
from tests.engine.test_vllm_scheduler import finish, step, wire_request, with_scheduler
from tests.engine.vllm_cores import tiny_core
from tests.policy.builders import candidate, report
from tests.scheduler.test_global_scheduler import ask

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_SIZE = 32
NUM_BLOCKS = 24
NUM_SLOTS = 6
CHUNK = 64

I0, M = InstanceId("i0"), MigrationId("m")
LATE = replace(ROUND_ROBIN, binds_late=True)


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A core that may compute as many prompts in a step as it has memory for."""
    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS + 1,
        max_num_batched_tokens=(NUM_BLOCKS + 1) * BLOCK_SIZE,
        max_num_seqs=NUM_SLOTS,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    ) as core:
        yield core


@pytest.fixture
def chunking_core(vllm_core: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same core; schedulers that it gets now compute prompts in chunks."""
    config = vllm_core.vllm_config.scheduler_config
    monkeypatch.setattr(config, "max_num_batched_tokens", CHUNK)
    return vllm_core


def add(core: Any, name: str, *parts: tuple[int, int], output_tokens: int = 8) -> None:
    """Add a request whose prompt has each of these tokens as often as the number behind it says."""
    token_ids = [token for token, num_times in parts for _ in range(num_times)]
    request = wire_request(name, len(token_ids), output_tokens=output_tokens)
    request.prompt_token_ids = token_ids
    core.add_request(*core.preprocess_add_request(request))


def view_of(core: Any) -> InstanceView:
    view: InstanceView = core.scheduler.view(I0, False)
    return view


def room_of(core: Any) -> Room:
    """The room of a cluster with this instance alone, from its newest load."""
    return Room.of(CandidateTable([candidate(view_of(core))]), growth_steps=0)


def room_blocks(core: Any) -> int:
    return int(room_of(core).most_tokens) // BLOCK_SIZE


def has_room(core: Any, prompt_tokens: int) -> bool:
    demand_tokens = core.scheduler.groups.memory.demand_tokens(prompt_tokens)
    return len(room_of(core).candidates_for(demand_tokens)) == 1


def num_begun(core: Any) -> int:
    """The blocks that requests which decode begin in the next step."""
    running = view_of(core).running
    return sum(each.num_tokens > each.physical_usage_tokens for each in running)


def status(core: Any, name: str) -> str:
    return str(core.scheduler.requests[name].status.name)


def runs_after_a_step(core: Any, name: str) -> bool:
    step(core)
    assert status(core, name) in ("RUNNING", "WAITING")
    return status(core, name) == "RUNNING"


def end(core: Any) -> None:
    core.abort_requests(list(core.scheduler.requests))
    finish(core)


def any_length(rng: Random, num_blocks: int) -> int:
    """Any length that needs as many blocks."""
    return BLOCK_SIZE * num_blocks - rng.randrange(BLOCK_SIZE)


class Mix:
    """Requests of random lengths that come and go, none with the prefix of another."""

    def __init__(self, core: Any, seed: int) -> None:
        self.core = core
        self.rng = Random(seed)
        self.num_added = 0

    def add(self, num_blocks: int, output_tokens: int = 8) -> str:
        name = f"r{self.num_added}"
        self.num_added += 1
        prompt = (100 + self.num_added, any_length(self.rng, num_blocks))
        add(self.core, name, prompt, output_tokens=output_tokens)
        return name

    def go_on(self) -> None:
        """Some steps, with new requests in between, the last of which may have to wait."""
        for _ in range(self.rng.randrange(1, 4)):
            if view_of(self.core).queuing or self.rng.random() < 0.3:
                step(self.core)
            else:
                self.add(self.rng.randrange(1, 9), self.rng.randrange(2, 60))

    def until(self, begins: bool) -> bool:
        """Steps until some request begins a block in the next one, or none does; returns whether
        there are requests still."""
        while view_of(self.core).running and (num_begun(self.core) > 0) is not begins:
            step(self.core)
        return bool(view_of(self.core).running)


@pytest.mark.parametrize(
    ("prefix_caching", "watermark"), [(False, 0.0), (False, 0.1), (True, 0.0), (True, 0.3)]
)
def test_a_prompt_within_the_room_runs_after_a_step_and_one_of_a_block_more_waits(
    vllm_core: Any, prefix_caching: bool, watermark: float
) -> None:
    """Exact, beside requests that run, queue or were preempted, in steps in which none begins a
    block. With prefix caching the memory is full of what ended requests have left."""
    core = with_scheduler(
        vllm_core, max_num_seqs=NUM_SLOTS, watermark=watermark, prefix_caching=prefix_caching
    )
    mix, seen = Mix(core, seed=1), Counter[bool]()
    while min(seen[True], seen[False]) < 8:
        mix.go_on()
        if not mix.until(begins=False):
            continue
        num_blocks = max(0, room_blocks(core))
        fits = num_blocks > 0 and mix.rng.random() < 0.5
        name = mix.add(num_blocks if fits else num_blocks + 1)
        assert runs_after_a_step(core, name) is fits, (name, num_blocks)
        core.abort_requests([name])
        seen[fits] += 1
    end(core)


@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_the_room_is_too_large_by_the_blocks_that_the_batch_begins_in_the_step(
    vllm_core: Any, watermark: float
) -> None:
    """Exact is what is left of it beside these, which vLLM takes before it admits a request."""
    core = with_scheduler(vllm_core, max_num_seqs=NUM_SLOTS, watermark=watermark)
    mix, seen = Mix(core, seed=1), Counter[bool]()
    while min(seen[True], seen[False]) < 4:
        mix.go_on()
        if not mix.until(begins=True) or (room := room_blocks(core)) <= 0:
            step(core)
            continue
        num_left = room - num_begun(core)
        fits = num_left > 0 and mix.rng.random() < 0.5
        name = mix.add(num_left if fits else max(0, num_left) + 1)
        assert runs_after_a_step(core, name) is fits, (name, room, num_left)
        core.abort_requests([name])
        seen[fits] += 1
    end(core)


@pytest.mark.parametrize("num_running", [1, 2, 3])
def test_a_prompt_that_takes_all_of_the_room_waits_behind_blocks_that_the_batch_begins(
    vllm_core: Any, num_running: int
) -> None:
    """By hand: the first output token of a prompt of two whole blocks begins a third one."""
    core = with_scheduler(vllm_core, max_num_seqs=NUM_SLOTS)
    for number in range(num_running):
        add(core, f"r{number}", (100 + number, 64))
    step(core)
    assert room_blocks(core) == NUM_BLOCKS - 2 * num_running
    assert num_begun(core) == num_running
    add(core, "all", (200, BLOCK_SIZE * room_blocks(core)))
    assert not runs_after_a_step(core, "all")
    core.abort_requests(["all"])
    assert room_blocks(core) == NUM_BLOCKS - 3 * num_running
    add(core, "rest", (201, BLOCK_SIZE * room_blocks(core)))
    assert runs_after_a_step(core, "rest")
    end(core)


def test_beside_no_other_request_vllm_admits_more_than_the_room_by_its_watermark(
    vllm_core: Any,
) -> None:
    """By hand: 7 of the 25 blocks stay free beside others. The scheduler sends such a request for
    another reason: it would fit nowhere."""
    core = with_scheduler(vllm_core, watermark=0.3)
    assert room_blocks(core) == 17
    assert room_of(core).total_tokens == 17 * BLOCK_SIZE
    add(core, "large", (100, 23 * BLOCK_SIZE))
    assert runs_after_a_step(core, "large")
    assert room_blocks(core) == -6
    add(core, "small", (101, 1))
    assert not runs_after_a_step(core, "small")
    end(core)


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("last_queues", [False, True])
def test_there_is_no_room_while_requests_have_all_slots_or_will_have_them(
    vllm_core: Any, last_queues: bool, num_slots: int
) -> None:
    """By hand: all but the last one run; with memory for many more, a request waits until one of
    them is gone."""
    core = with_scheduler(vllm_core, max_num_seqs=num_slots)
    names = [f"r{number}" for number in range(num_slots)]
    for number, name in enumerate(names):
        if name == names[-1]:
            step(core)
            assert has_room(core, 8 * BLOCK_SIZE)
        add(core, name, (100 + number, 40), output_tokens=20)
    if not last_queues:
        step(core)
    assert room_of(core).most_tokens == 0
    assert not has_room(core, 1)
    add(core, "next", (200, 1))
    assert not runs_after_a_step(core, "next")
    assert status(core, names[-1]) == "RUNNING"
    assert not runs_after_a_step(core, "next")
    core.abort_requests(["next", names[0]])
    assert has_room(core, 8 * BLOCK_SIZE)
    add(core, "again", (201, 8 * BLOCK_SIZE))
    assert runs_after_a_step(core, "again")
    end(core)


def test_a_drained_request_keeps_its_slot_and_its_memory_from_the_room(vllm_core: Any) -> None:
    """By hand: of two slots, and of 24 blocks, of which each request has 4."""
    core = with_scheduler(vllm_core, max_num_seqs=2)
    stays, leaves = RequestId("stays"), RequestId("leaves")
    add(core, stays, (100, 100))
    step(core)
    add(core, leaves, (101, 100))
    step(core)
    drain = Drain(M, leaves, Mode.LIVE, 0, 0, max_blocks=NUM_BLOCKS)
    assert isinstance(core.scheduler.begin_drain(drain), Left)
    assert room_of(core).most_tokens == 0
    add(core, "next", (102, 1))
    assert not runs_after_a_step(core, "next")
    core.abort_requests([stays, "next"])
    assert room_blocks(core) == 20
    core.scheduler.release(leaves)
    assert room_blocks(core) == 24
    end(core)


def test_a_slot_that_an_arriving_request_has_reserved_is_not_in_the_room(vllm_core: Any) -> None:
    """By hand: of two slots one request has one, and another one is on its way to the other."""
    core = with_scheduler(vllm_core, max_num_seqs=2)
    add(core, "runs", (100, 40), output_tokens=20)
    step(core)
    assert has_room(core, BLOCK_SIZE)
    core.scheduler.reserve(M, (range(1),), needs_slot=True)
    assert room_of(core).most_tokens == 0
    add(core, "next", (101, BLOCK_SIZE))
    assert not runs_after_a_step(core, "next")
    core.scheduler.free_reservation(M)
    assert runs_after_a_step(core, "next")
    end(core)


@pytest.mark.parametrize(("watermark", "expected"), [(0.0, 15), (0.1, 13)])
def test_memory_that_is_reserved_for_an_arriving_request_is_not_in_the_room(
    vllm_core: Any, watermark: float, expected: int
) -> None:
    """By hand: of 24 blocks, or of 22, one request has 4 and another one has reserved 5."""
    core = with_scheduler(vllm_core, watermark=watermark)
    add(core, "runs", (100, 100), output_tokens=20)
    step(core)
    core.scheduler.reserve(M, (range(5),), needs_slot=False)
    assert room_blocks(core) == expected
    add(core, "more", (101, BLOCK_SIZE * expected + 1))
    assert not runs_after_a_step(core, "more")
    core.abort_requests(["more"])
    add(core, "all", (102, BLOCK_SIZE * expected))
    assert runs_after_a_step(core, "all")
    core.scheduler.free_reservation(M)
    end(core)


@pytest.mark.parametrize("watermark", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_with_shared_prefixes_a_prompt_within_the_room_always_runs_and_a_larger_one_may(
    vllm_core: Any, seed: int, watermark: float
) -> None:
    """Conservative: a prompt counts with all of its tokens, also where running requests share its
    prefix. Some that are larger than the room share enough to be admitted."""
    core = with_scheduler(
        vllm_core, max_num_seqs=NUM_SLOTS, watermark=watermark, prefix_caching=True
    )
    mix, seen = Mix(core, seed), Counter[tuple[bool, bool]]()
    rng, own_tokens = mix.rng, count(200)

    def add_some(name: str, num_blocks: int, output_tokens: int) -> None:
        num_tokens = any_length(rng, num_blocks)
        num_common = rng.randrange(num_tokens)
        common, own = 100 + rng.randrange(2), next(own_tokens)
        parts = (common, num_common), (own, num_tokens - num_common)
        add(core, name, *parts, output_tokens=output_tokens)

    for number in range(60):
        if room_blocks(core) > 8 and not view_of(core).queuing:
            add_some(f"base{number}", rng.randrange(1, 9), rng.randrange(2, 60))
            step(core)
        if not mix.until(begins=False):
            continue
        name, num_blocks = f"probe{number}", max(0, room_blocks(core))
        fits = num_blocks > 0 and rng.random() < 0.6
        add_some(name, num_blocks if fits else num_blocks + 1, 2)
        runs = runs_after_a_step(core, name)
        assert runs or not fits, (name, num_blocks)
        core.abort_requests([name])
        seen[fits, runs] += 1
    assert seen[True, True] > 10
    assert seen[False, True] > 0
    end(core)


def test_the_room_is_too_small_by_what_a_prompt_shares_with_running_requests(
    vllm_core: Any,
) -> None:
    """By hand: 20 blocks run. Of a prompt of 19, the first 18 are among them; so it is admitted
    where one of its own gets at most 4. What two share, the room counts once, and exactly."""
    core = with_scheduler(vllm_core, prefix_caching=True)
    add(core, "runs", (100, 640 - 24), output_tokens=20)
    step(core)
    assert room_blocks(core) == 4
    shares = (100, 18 * BLOCK_SIZE), (101, BLOCK_SIZE - 10)
    assert not has_room(core, sum(num_tokens for _, num_tokens in shares))
    add(core, "shares", *shares, output_tokens=9)
    assert runs_after_a_step(core, "shares")
    assert room_blocks(core) == 3
    add(core, "more", (102, 3 * BLOCK_SIZE + 1))
    assert not runs_after_a_step(core, "more")
    core.abort_requests(["more"])
    add(core, "all", (103, 3 * BLOCK_SIZE))
    assert runs_after_a_step(core, "all")
    end(core)


def test_the_room_is_exact_for_a_prompt_of_which_ended_requests_left_a_prefix(
    vllm_core: Any,
) -> None:
    """By hand: 14 of 24 blocks run, and the other 10 are cached: they are free, and to use them
    takes them. Of a prompt of 11 that begins with these, the last is missing."""
    core = with_scheduler(vllm_core, prefix_caching=True)
    add(core, "ends", (100, 10 * BLOCK_SIZE), output_tokens=1)
    finish(core)
    add(core, "runs", (101, 14 * BLOCK_SIZE - 24), output_tokens=20)
    step(core)
    assert room_blocks(core) == 10
    add(core, "more", (100, 10 * BLOCK_SIZE + 1))
    (queuing,) = view_of(core).queuing
    assert queuing.uncomputed_tokens == 1
    assert not runs_after_a_step(core, "more")
    core.abort_requests(["more"])
    add(core, "all", (100, 10 * BLOCK_SIZE))
    assert runs_after_a_step(core, "all")
    end(core)


def runs_when_a_step_has_tokens_left(core: Any, name: str) -> bool:
    """Whether the request is in the batch by the first step that has tokens left behind others'
    prompts."""
    num_scheduled: list[int] = []
    core.scheduler.on_scheduled = (
        lambda output: num_scheduled.append(output.total_num_scheduled_tokens),
    )
    for _ in range(40):
        if runs_after_a_step(core, name):
            return True
        if num_scheduled[-1] < CHUNK:
            return False
    raise AssertionError("the prompts have no end")


@pytest.mark.parametrize("watermark", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(8))
def test_a_prompt_in_chunks_has_all_of_its_memory_before_another_one_gets_any(
    chunking_core: Any, seed: int, watermark: float
) -> None:
    """Exact, once a step has tokens left: a prompt within the room may wait for these, but not for
    memory, and one of a block more waits for memory then. None that runs begins a block."""
    core, rng = (
        with_scheduler(chunking_core, max_num_seqs=NUM_SLOTS, watermark=watermark),
        Random(seed),
    )
    for number in range(rng.randrange(1, 5)):
        num_blocks = rng.randrange(1, 6)
        add(core, f"r{number}", (100 + number, BLOCK_SIZE * num_blocks - 31), output_tokens=28)
        for _ in range(rng.randrange(3)):
            step(core)
    rooms = [room_blocks(core)]
    for fits in (True, False):
        name = f"fits-{fits}"
        add(core, name, (200, any_length(rng, rooms[0] if fits else rooms[0] + 1)))
        assert runs_when_a_step_has_tokens_left(core, name) is fits
        core.abort_requests([name])
        rooms.append(room_blocks(core))
    assert rooms == [rooms[0]] * 3
    end(core)


def test_a_prompt_counts_with_its_whole_demand_from_its_first_chunk_on(chunking_core: Any) -> None:
    """By hand: 64 tokens a step; 600 tokens of prompt need 19 of 24 blocks, in ten steps, of which
    the last one has tokens left."""
    core = with_scheduler(chunking_core)
    add(core, "long", (100, 600), output_tokens=20)
    step(core)
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 22
    assert room_blocks(core) == 5
    add(core, "all", (101, 5 * BLOCK_SIZE))
    statuses = []
    for _ in range(9):
        step(core)
        statuses.append(status(core, "all"))
    assert statuses == ["WAITING"] * 8 + ["RUNNING"]
    core.abort_requests(["all"])
    step(core)
    assert room_blocks(core) == 5
    add(core, "more", (102, 5 * BLOCK_SIZE + 1))
    assert not runs_after_a_step(core, "more")
    end(core)


def test_beside_a_prompt_with_a_limit_to_its_chunks_vllm_admits_more_than_the_room(
    chunking_core: Any,
) -> None:
    """By hand: 32 of a step's 64 tokens are the most for one prompt. The other 32 go to whatever
    fits beside its chunks so far: a prompt within the room, but also one of 20 blocks."""
    core = with_scheduler(chunking_core)
    core.scheduler.scheduler_config.long_prefill_token_threshold = 32
    add(core, "long", (100, 600), output_tokens=20)
    step(core)
    for num_blocks in (5, 20):
        assert room_blocks(core) == 5
        add(core, "next", (101, num_blocks * BLOCK_SIZE))
        assert runs_after_a_step(core, "next")
        core.abort_requests(["next"])
    end(core)


@pytest.mark.parametrize("watermark", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_sent_on_one_report_runs_and_what_is_held_would_wait(
    vllm_core: Any, seed: int, watermark: float
) -> None:
    """Exact for a burst: a request on its way counts with its demand and its slot."""
    core = with_scheduler(vllm_core, max_num_seqs=NUM_SLOTS, watermark=watermark)
    rng, scheduler = Random(seed), GlobalScheduler(LATE, now_s=0.0)
    add(core, "runs", (99, 65), output_tokens=60)
    step(core)
    scheduler.on_load(report(view_of(core), LATE), 0.0)
    lengths = {f"r{number}": any_length(rng, rng.randrange(1, 9)) for number in range(12)}
    effects: list[Effect] = []
    for name, num_tokens in lengths.items():
        demand_tokens = core.scheduler.groups.memory.demand_tokens(num_tokens)
        effects += scheduler.on_request(ask(name, demand_tokens), 0.0)
    names = [str(each.request_id) for each in effects if isinstance(each, Dispatch)]
    held = [name for name in lengths if name not in names]
    assert names
    assert len(held) == scheduler.num_held > 0
    for number, name in enumerate(names + held):
        add(core, name, (100 + number, lengths[name]))
    step(core)
    assert {status(core, name) for name in names} == {"RUNNING"}
    assert {status(core, name) for name in held} == {"WAITING"}
    end(core)


@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_with_a_block_left_for_each_request_all_that_is_sent_runs_after_the_next_step(
    vllm_core: Any, watermark: float
) -> None:
    """Conservative: a request begins at most one block a step (`growth_steps`). Requests come and
    are held, and the reports after each step decide when they are sent."""
    core = with_scheduler(vllm_core, max_num_seqs=NUM_SLOTS, watermark=watermark)
    policy = replace(LATE, growth_steps=float(BLOCK_SIZE))
    mix, scheduler = Mix(core, seed=1), GlobalScheduler(policy, now_s=0.0)
    lengths: dict[str, int] = {}
    num_requests, num_sent, last_number, most_held = 25, 0, 0, 0
    for now in range(1, 400):
        load = report(view_of(core), policy, sequence=now, last_dispatch=last_number)
        effects = scheduler.on_load(load, float(now))
        if len(lengths) < num_requests and mix.rng.random() < 0.5:
            name = f"q{len(lengths)}"
            lengths[name] = any_length(mix.rng, mix.rng.randrange(1, 11))
            demand_tokens = core.scheduler.groups.memory.demand_tokens(lengths[name])
            effects += scheduler.on_request(
                ask(name, demand_tokens, arrival_s=float(now)), float(now)
            )
        most_held = max(most_held, scheduler.num_held)
        sent = [each for each in effects if isinstance(each, Dispatch)]
        for each in sent:
            last_number = each.dispatch_number
            prompt = (100 + num_sent, lengths[each.request_id])
            num_sent += 1
            add(core, each.request_id, prompt, output_tokens=mix.rng.randrange(2, 60))
        step(core)
        assert {status(core, each.request_id) for each in sent} <= {"RUNNING"}
        if num_sent == num_requests:
            break
    assert (num_sent, scheduler.num_held) == (num_requests, 0)
    assert most_held > 2
    end(core)
