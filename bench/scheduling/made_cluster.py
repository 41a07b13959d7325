"""A made-up cluster in the middle of its work, and requests to it. Pure.

What is measured depends on the number of instances, on how many of them changed since the last
decision, and on the prompts' blocks; loads and prompts are drawn so that decisions are not alike.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from sterna.config import LlumletConfig
from sterna.instance.llumlet import spread_interval_s
from sterna.messages.actors import (
    CacheReport,
    DispatchRequest,
    FrontendMember,
    InstanceMember,
    LoadReport,
    Membership,
)
from sterna.policy.presets import LLUMNIX
from sterna.types import (
    NORMAL,
    CacheGroup,
    CacheLayout,
    FrontendId,
    InstanceId,
    InstanceLoad,
    RequestId,
    packed,
    unpacked,
)

RATE = 500.0
"""Requests a second."""

BLOCK_TOKENS = 16
LAYOUT = CacheLayout(BLOCK_TOKENS, BLOCK_TOKENS, (CacheGroup(0, BLOCK_TOKENS),), moves=True)

TOTAL_TOKENS = 286_704
"""That of the H100 profile."""

NUM_BLOCKS = TOTAL_TOKENS // BLOCK_TOKENS

MAX_NUM_SEQS = 256

NUM_PREFIXES = 200
PREFIX_TOKENS, NEW_TOKENS = (500, 8_000), (50, 1_000)
"""Bounds of the length of a shared prefix, and of what a prompt has beyond it."""

HOLDERS_OF_A_PREFIX = 3
"""Instances that have it at first, on average."""

FRONTEND = FrontendId(0)


def report_interval_s(num_instances: int) -> float:
    """Time between two load reports of an instance, among as many whose loads change all the
    time."""
    interval_s = LlumletConfig(LLUMNIX).report_interval_s
    assert interval_s is not None
    return spread_interval_s(interval_s, num_instances)


def reports_a_decision(num_instances: int) -> float:
    """The load reports of all instances between two requests, on average."""
    return num_instances / report_interval_s(num_instances) / RATE


class MadeCluster:
    """Instances and their reports.

    Args:
        num_instances: at least 1.
        frontend: the address of the front end's mailbox; "" without one.
        instances: the addresses of the instances' mailboxes, or one that all have.
    """

    def __init__(
        self,
        num_instances: int,
        seed: int,
        frontend: str = "front end",
        instances: Sequence[str] = ("instances",),
    ) -> None:
        assert len(instances) in (1, num_instances)
        self._draws = random.Random(seed)
        self._ids = [InstanceId(f"i{number}") for number in range(num_instances)]
        self._sequences = dict.fromkeys(self._ids, 0)
        self._frontend = frontend
        self._instances = instances
        self._prefixes = [self._hashes(*PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self._num_asked = 0
        # The blocks in each prefix cache, the oldest first.
        self._cached: dict[InstanceId, dict[int, None]] = {each: {} for each in self._ids}

    def membership(self, version: int = 1) -> Membership:
        """All instances, and the front end if it has an address."""
        members = zip(self._ids, itertools.cycle(self._instances), strict=False)
        return Membership(
            version,
            tuple(InstanceMember(each, address) for each, address in members),
            (FrontendMember(FRONTEND, self._frontend),) if self._frontend else (),
            None,
        )

    def caches(self) -> Iterator[CacheReport]:
        """What each instance's prefix cache has: some of the prefixes."""
        for prefix in self._prefixes:
            num_holders = min(len(self._ids), self._draws.randint(1, 2 * HOLDERS_OF_A_PREFIX - 1))
            for holder in self._draws.sample(self._ids, num_holders):
                if len(self._cached[holder]) + len(prefix) <= NUM_BLOCKS:
                    self._cached[holder] |= dict.fromkeys(prefix)
        for instance_id, hashes in self._cached.items():
            yield CacheReport(instance_id, packed(hashes), layout=LAYOUT)

    def holder(self, request: DispatchRequest) -> InstanceId:
        """An instance that has the beginning of the prompt in its prefix cache, or any."""
        first = int(unpacked(request.block_hashes)[0])
        holders = [each for each, cached in self._cached.items() if first in cached]
        return self._draws.choice(holders or self._ids)

    def computed(self, instance_id: InstanceId, request: DispatchRequest) -> CacheReport:
        """The report of an instance that has computed the prompt: its blocks, and those that had to
        go for them."""
        cached = self._cached[instance_id]
        added = [each for each in unpacked(request.block_hashes) if each not in cached]
        cached |= dict.fromkeys(added)
        num_removed = max(0, len(cached) - NUM_BLOCKS)
        removed = list(itertools.islice(cached, num_removed))
        for block_hash in removed:
            del cached[block_hash]
        return CacheReport(instance_id, packed(added), packed(removed))

    def loads(self) -> Iterator[LoadReport]:
        """The next report of each instance."""
        for instance_id in self._ids:
            yield self._load(instance_id)

    def drawn_load(self, last_dispatch: int) -> LoadReport:
        """The next report of any instance, which shows all dispatches up to this one."""
        return self._load(self._draws.choice(self._ids), last_dispatch)

    def load_of(self, number: int, last_dispatch: int) -> LoadReport:
        """The next report of the instance of this number, likewise."""
        return self._load(self._ids[number], last_dispatch)

    def request(self) -> DispatchRequest:
        """The next request: a shared prefix, and more."""
        self._num_asked += 1
        prefix = self._draws.choice(self._prefixes)
        hashes = (*prefix, *self._hashes(*NEW_TOKENS))
        num_tokens = len(hashes) * BLOCK_TOKENS + self._draws.randrange(BLOCK_TOKENS)
        return DispatchRequest(
            FRONTEND,
            RequestId(f"r{self._num_asked}"),
            num_tokens + BLOCK_TOKENS,
            0.0,
            NORMAL,
            NORMAL,
            prompt_tokens=num_tokens,
            block_hashes=packed(hashes),
        )

    def _load(self, instance_id: InstanceId, last_dispatch: int = 0) -> LoadReport:
        draws = self._draws
        self._sequences[instance_id] += 1
        used_tokens = draws.randrange(20_000, TOTAL_TOKENS // 2)
        num_running = draws.randrange(1, MAX_NUM_SEQS // 4)
        free_tokens = TOTAL_TOKENS - used_tokens
        load = InstanceLoad(
            instance_id,
            self._sequences[instance_id],
            TOTAL_TOKENS,
            used_tokens,
            free_tokens,
            free_tokens,
            num_running,
            0,
            num_by_priority=((NORMAL, num_running),),
            last_dispatch=last_dispatch,
            move_tokens=2_048,
            uncomputed_tokens=draws.choice((0, 0, 0, 3_000)),
            num_slots=MAX_NUM_SEQS,
        )
        return LoadReport(load)

    def _hashes(self, least: int, most: int) -> tuple[int, ...]:
        num_blocks = self._draws.randint(least, most) // BLOCK_TOKENS
        return tuple(self._draws.getrandbits(64) for _ in range(num_blocks))
