"""Checks after every event, and in the end.

The answers to clients are checked in `ledger`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from fault_simulation.oracle.ledger import request_of
from fault_simulation.oracle.token_oracle import Stream
from fault_simulation.virtual.timeline import Violation
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.requests import EmulatedRequest
from sterna.frontend.requests.core import FrontendCore
from sterna.instance.core import InstanceCore
from sterna.scheduler.core import SchedulerCore
from sterna.types import FrontendId, InstanceId, RequestId

FIRST_REPORT_S = 3.0
"""By then a scheduler knows of an instance that has come up."""

MAX_UNWANTED_TOKENS = 4
"""A step may be under way when an instance hears of a death, and more until its engine does."""


class Cache(Protocol):
    """A KV cache, as the checkers see it."""

    @property
    def num_blocks(self) -> int:
        """Its blocks, in all groups together."""

    @property
    def num_free(self) -> int:
        """Blocks that neither a request nor a reservation holds."""

    def keys(self) -> Set[int]:
        """The keys of all blocks in the prefix cache."""

    def new_wrong_keys(self) -> Sequence[str]:
        """Descriptions of blocks that have entered the prefix cache since the last call, and have
        other KV than it says."""

    def wrong_keys(self) -> Sequence[str]:
        """The same of all blocks in the prefix cache."""


class Engine(Protocol):
    """An engine, as the checkers see it.

    Attributes:
        tell_s: its instance hears of what it did at most this much later.
        all_told_s: the time by which its instance has heard of all that it has done.
    """

    streams: dict[RequestId, Stream]
    tell_s: float
    all_told_s: float

    @property
    def core(self) -> EmulatedCore:
        """Its batch, its queue and its reservations."""

    @property
    def cache(self) -> Cache:
        """Its KV cache."""


class Instance(Protocol):
    """An instance, as the checkers see it.

    Attributes:
        told_to_end: the requests of its engine that it was told to end.
        up_since_s: when it came up.
    """

    name: str
    core: InstanceCore
    told_to_end: set[RequestId]
    up_since_s: float

    @property
    def engine(self) -> Engine:
        """Its engine."""

    @property
    def now_s(self) -> float:
        """The time of the world."""

    @property
    def may_act(self) -> bool:
        """Whether it acts on others: not when it is dead, nor when its lease has ended."""

    @property
    def gone_frontends(self) -> Set[FrontendId]:
        """The front ends of whose death it has heard."""


class Scheduler(Protocol):
    """A scheduler, as the checkers see it."""

    name: str
    core: SchedulerCore


class FrontendStreams(Protocol):
    """The streams of a front end that outlive it."""

    def check_rest(self) -> None:
        """Check them after all streams have ended; raises Violation."""


class Frontend(Protocol):
    """A front end, as the checkers see it."""

    name: str
    core: FrontendCore

    @property
    def streams(self) -> FrontendStreams | None:
        """Its streams, in a cluster where they outlive front ends."""


@dataclass(slots=True)
class Unwanted:
    """A request that its instance knows to be unwanted: the instance was told to end it, or knows
    that its front end is dead.

    Attributes:
        num_tokens: number of its tokens when the instance had to end it.
        heard_s: the time by which the instance has heard that the request is here, and the outcomes
            that an abort waits for. Instances may hear late of what their engines did.
    """

    num_tokens: int
    heard_s: float


class Checkers:
    """Checks the instance that an event has changed."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._instances: dict[str, Instance] = {}
        # The instance that may step each request.
        self._owners: dict[RequestId, str] = {}
        self._owned: dict[str, set[RequestId]] = {}
        self._unwanted: dict[str, dict[RequestId, Unwanted]] = {}
        # The attempts of each request that were ever stepped.
        self._attempts: dict[RequestId, set[RequestId]] = {}

    def check(self, instance: Instance) -> None:
        """Check the instance after an event of it.

        Raises:
            Violation: two engines may step a request, or one steps a request that it knows to be
                unwanted, or a block was lost or given twice, or the prefix cache has got KV that is
                not what it says.
        """
        self._instances[instance.name] = instance
        core, cache = instance.engine.core, instance.engine.cache
        steppable: set[RequestId] = set()
        num_blocks = cache.num_free + core.num_reserved_blocks + core.num_kept_blocks
        if instance.may_act:
            requests = core.requests()
            self._forget_what_left(instance, requests)
            for request in requests:
                num_blocks += request.num_blocks
                if not core.is_drained(request.request_id):
                    steppable.add(request.request_id)
                    if instance.gone_frontends or instance.told_to_end:
                        self._check_is_wanted(instance, request)
            if num_blocks != cache.num_blocks:
                raise Violation(f"{instance.name} has {num_blocks} of {cache.num_blocks} blocks")
            for wrong in cache.new_wrong_keys():
                raise Violation(f"the prefix cache of {instance.name} has {wrong}")
        name = instance.name
        owned = self._owned.get(name, set())
        if steppable == owned:
            return
        for request_id in sorted(steppable - owned):
            owner = self._owners.get(request_id)
            if owner is not None and self._may_act(owner):
                raise Violation(f"{request_id} has two owners: {owner} and {name}")
            self._owners[request_id] = name
            self._count_attempts(request_id)
        for request_id in owned - steppable:
            if self._owners[request_id] == name:
                del self._owners[request_id]
        self._owned[name] = steppable

    def _forget_what_left(self, instance: Instance, requests: Iterable[EmulatedRequest]) -> None:
        """Forget unwanted requests that have left. One that comes back counts again: its front end,
        which would have it ended, may not know that it is back."""
        unwanted = self._unwanted.get(instance.name)
        if unwanted or instance.told_to_end:
            here = {each.request_id for each in requests}
            instance.told_to_end &= here
            for request_id in [each for each in unwanted or () if each not in here]:
                del self._unwanted[instance.name][request_id]

    def _check_is_wanted(self, instance: Instance, request: EmulatedRequest) -> None:
        """An instance must end a request that it knows to be unwanted; raises Violation."""
        request_id = request.request_id
        stream = instance.engine.streams.get(request_id)
        is_told = request_id in instance.told_to_end
        is_gone = stream is not None and stream.ask.frontend_id in instance.gone_frontends
        if not is_told and not is_gone:
            return
        num_tokens = request.num_output_tokens
        known = self._unwanted.setdefault(instance.name, {})
        unwanted = known.get(request_id)
        if unwanted is None:
            engine = instance.engine
            heard_s = max(instance.now_s, engine.all_told_s) + engine.tell_s
            known[request_id] = Unwanted(num_tokens, heard_s)
        elif instance.now_s < unwanted.heard_s:
            unwanted.num_tokens = num_tokens
        elif num_tokens - unwanted.num_tokens > MAX_UNWANTED_TOKENS:
            reason = "was told to end it" if is_told else "knows that its front end is dead"
            raise Violation(f"{instance.name} steps {request_id}, and {reason}")

    def _count_attempts(self, attempt_id: RequestId) -> None:
        """Count an attempt whose steps begin beside those of another attempt of its request, on an
        instance that has not heard yet that this one is unwanted."""
        attempts = self._attempts.setdefault(request_of(attempt_id), set())
        owners = [self._owners.get(each) for each in attempts if each != attempt_id]
        if any(each is not None and self._may_act(each) for each in owners):
            self._counts["two attempts stepped at once"] += 1
        attempts.add(attempt_id)

    def _may_act(self, name: str) -> bool:
        return self._instances[name].may_act


def check_rest(
    instances: Iterable[Instance],
    frontends: Iterable[Frontend],
    schedulers: Iterable[Scheduler],
) -> None:
    """Check the processes some time after all requests have ended.

    Raises:
        Violation: something is left of them somewhere.
    """
    for instance in instances:
        core = instance.engine.core
        if not core.is_empty:
            left = sorted(each.request_id for each in core.requests())
            raise Violation(
                f"{instance.name} still has requests {left}, {core.num_reservations} reservations"
            )
        if instance.core.has_open_migrations:
            raise Violation(f"{instance.name} has a migration that has not ended")
        if left := sorted(instance.core.requests()):
            raise Violation(f"{instance.name} still answers for {left}")
        if instance.engine.streams:
            raise Violation(f"{instance.name} keeps streams that have ended")
        for wrong in instance.engine.cache.wrong_keys():
            raise Violation(f"the prefix cache of {instance.name} has {wrong}")
    for frontend in frontends:
        if frontend.core.next_deadline_s is not None:
            raise Violation(f"{frontend.name} still waits for something")
        if frontend.streams is not None:
            frontend.streams.check_rest()
    for scheduler in schedulers:
        if scheduler.core.num_held:
            raise Violation(f"{scheduler.name} still holds {scheduler.core.num_held} requests")


def check_prefixes(instances: Sequence[Instance], schedulers: Iterable[Scheduler]) -> None:
    """Check what schedulers know of prefix caches, some time after all requests have ended.

    An instance that has just come up may not have reported yet, and one that is dead may still be
    in the newest membership: its supervisor has to notice that, or to wait for a lease.

    Raises:
        Violation: they know other instances than live, or other contents than these have.
    """
    there = {InstanceId(each.name): each.engine.cache.keys() for each in instances}
    young = {
        InstanceId(each.name) for each in instances if each.now_s - each.up_since_s < FIRST_REPORT_S
    }
    for scheduler in schedulers:
        known = scheduler.core.prefixes.contents()
        members = {each.instance_id for each in scheduler.core.membership.instances}
        if (known.keys() | young) - (members - there.keys()) != there.keys():
            raise Violation(
                f"{scheduler.name} knows the prefix caches of {sorted(known)}, "
                f"and {sorted(there)} live"
            )
        for instance_id in sorted(there.keys() - young):
            keys = there[instance_id]
            if known[instance_id] != keys:
                raise Violation(
                    f"{scheduler.name} lacks {len(keys - known[instance_id])} keys of the prefix "
                    f"cache of {instance_id}, and has {len(known[instance_id] - keys)} too many"
                )
