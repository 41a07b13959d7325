"""Section 4.4.3 at work on real engines whose memory is far too small: two hundred requests over
two instances of 39 blocks, migrations on. In float32 each must say what it says without any."""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest
from vllm.v1.engine import EngineCoreRequest

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import LLUMNIX
from sterna.scheduler.global_scheduler import Dispatch, GlobalScheduler, SetDestination
from sterna.types import NORMAL, InstanceLoad, RequestId
from tests.cluster.conftest import BLOCK_SIZE, Run
from tests.cluster.pair import FRONTEND, Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_REQUESTS = 200


def build_all(pair: InstancePair) -> list[EngineCoreRequest]:
    """Requests of 40 to 210 tokens: a batch of 16 does not fit."""
    rng = random.Random(17)
    requests = []
    for seed in range(NUM_REQUESTS):
        prompt = random_prompt(rng.randint(20, 130), seed=seed)
        seeded = {"temperature": 0.8, "seed": seed} if seed % 2 else {}
        max_tokens = rng.randint(20, 80)
        requests.append(pair.build(prompt, max_tokens=max_tokens, ignore_eos=True, **seeded))
    return requests


@pytest.fixture(scope="module")
def expected(shared_tiny: InstancePair, run: Run) -> list[Generated]:
    """What the requests say where they were sent."""

    async def generate() -> list[Generated]:
        sent = [
            shared_tiny.submit(request, f"i{index % 2}")
            for index, request in enumerate(build_all(shared_tiny))
        ]
        return [await each.until_end() for each in sent]

    found: list[Generated] = run(generate())
    return found


class Scheduling:
    """The global scheduler over a pair: its rounds are held with the instances' reports."""

    def __init__(self, pair: InstancePair, policy: PolicyConfig) -> None:
        self._pair = pair
        self._loop = asyncio.get_running_loop()
        self._core = GlobalScheduler(policy, now_s=self._loop.time())
        self._asked: dict[RequestId, EngineCoreRequest] = {}
        self.generated: dict[RequestId, Generated] = {}
        for load in pair.loads.values():
            self._core.on_load(load, self._loop.time())
        pair.on_load = self._on_load

    def send(self, request: EngineCoreRequest) -> None:
        """Have the scheduler choose an instance for the request."""
        request_id = RequestId(request.request_id)
        self._asked[request_id] = request
        num_blocks = -(-len(request.prompt_token_ids) // BLOCK_SIZE)
        asked = DispatchRequest(
            FRONTEND, request_id, num_blocks * BLOCK_SIZE, self._loop.time(), NORMAL, NORMAL
        )
        self._carry_out(self._core.on_request(asked, self._loop.time()))

    def _on_load(self, load: InstanceLoad) -> None:
        self._carry_out(self._core.on_load(load, self._loop.time()))
        self._carry_out(self._core.on_tick(self._loop.time()))

    def _carry_out(self, effects: list[object]) -> None:
        for effect in effects:
            match effect:
                case Dispatch(request_id, _, instance_id, dispatch_number):
                    self.generated[request_id] = self._pair.submit(
                        self._asked.pop(request_id), instance_id, dispatch_number
                    )
                case SetDestination(source, destination):
                    self._pair.set_destination(source, destination)


def check(found: list[Generated], expected: list[Generated]) -> int:
    """All are complete and right; returns how often they moved."""
    for each, alone in zip(found, expected, strict=True):
        assert_same(each, alone)
    return sum(len(each.moves) for each in found)


def test_two_hundred_requests_under_the_global_schedulers_pairing_are_all_right(
    tiny: InstancePair, run: Run, expected: list[Generated]
) -> None:
    """Dispatched in bursts, most of them long: instances run out of memory at different times,
    and the scheduler pairs them."""

    async def serve() -> list[Generated]:
        policy = replace(LLUMNIX, round_interval_s=0.05)
        scheduling = Scheduling(tiny, policy)
        requests = build_all(tiny)
        for request in requests:
            scheduling.send(request)
        return [
            await scheduling.generated[RequestId(request.request_id)].until_end()
            for request in requests
        ]

    preemptions = sum(load.num_preemptions for load in tiny.loads.values())
    num_moves = check(run(serve()), expected)
    assert num_moves > 0
    assert sum(load.num_preemptions for load in tiny.loads.values()) > preemptions
    run(tiny.until_idle())


def test_two_hundred_requests_that_are_pushed_back_and_forth_are_all_right(
    tiny: InstancePair, run: Run, expected: list[Generated]
) -> None:
    """Each report turns the direction: four migrations at a time, both ways, for as long as there
    are requests, into instances that have no room and preempt."""

    async def serve() -> list[Generated]:
        turns = itertools.cycle([("i1", None), (None, "i0"), ("i1", "i0")])

        def push(load: InstanceLoad) -> None:
            first, second = next(turns)
            tiny.set_destination("i0", first)
            tiny.set_destination("i1", second)

        tiny.on_load = push
        sent = [
            tiny.submit(request, "i0" if index % 4 else "i1")
            for index, request in enumerate(build_all(tiny))
        ]
        return [await each.until_end() for each in sent]

    num_moves = check(run(serve()), expected)
    assert num_moves > NUM_REQUESTS / 4
    run(tiny.settle())
