"""Configuration: one frozen dataclass per component, validated when built. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from sterna.errors import ConfigurationError, InvalidValueError, Setting
from sterna.types import HIGH, NORMAL, InstanceId, InstanceView, Priority, RequestView

LOOPBACK = "127.0.0.1"
"""The address on which all members of a cluster on one machine listen."""


def _require(holds: bool, owner: object, field: str, rule: str, *others: Setting) -> None:
    if not holds:
        raise InvalidValueError(Setting.of(owner, field), rule, others)


class Victim(Enum):
    """Rule for the request of a source that moves first, among those of the lowest priority."""

    SHORTEST = "shortest"
    LONGEST = "longest"
    LAST_STARTED = "last_started"
    """The last one of the engine's batch. In vLLM's order that is the one that entered it last,
    migrated ones included; in order of priority and arrival, as in the paper's engine
    (`Preemption.LATEST_ARRIVED`), the one that arrived last."""
    FREEING = "freeing"
    """The one that frees most memory for what is copied: what it found in the prefix cache is
    copied with it, and others may still hold it. Of equal ones the shortest."""


class QueueDemand(Enum):
    """The queuing requests that have a virtual usage."""

    HEAD = "head"
    """Only the head of the line (Algorithm 1)."""
    ALL = "all"
    """Every queuing request (INFaaS++, Section 6.1)."""


class DispatchRule(Enum):
    """Rule for the instance of a new request."""

    FREEST = "freest"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    """Of two instances that are drawn, the one with fewer requests."""
    SESSION_HASH = "session_hash"
    """Requests of a session to one instance, by a hash; others to the one with fewest requests."""
    VLLM_DP = "vllm_dp"
    """That of vLLM's own data parallelism: requests, and those that wait where memory is short."""


@dataclass(frozen=True, slots=True)
class LlmD:
    """llm-d's dispatch, sticky until saturated.

    Attributes:
        min_share: instances that have this share of the prompt are preferred,
        saturation_tokens: as long as the best of them has at most this many tokens to compute more
            than the best other one. The default is 18 s at 15,928 tokens/s, 35 steps of 8,192.
    """

    min_share: float = 0.8
    saturation_tokens: float = 286_704.0

    def __post_init__(self) -> None:
        _require(0 <= self.min_share <= 1, self, "min_share", "between 0 and 1")
        _require(self.saturation_tokens >= 0, self, "saturation_tokens", "at least 0")


@dataclass(frozen=True, slots=True)
class Dynamo:
    """Dynamo's dispatch, by a cost in tokens.

    Attributes:
        prefill_scale: weight of the tokens to compute, against those of the memory in use.
        overlap_credit: part of the cached tokens that need not be computed.
        request_tokens: cost of each request that the instance has.
    """

    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    request_tokens: float = 0.0

    def __post_init__(self) -> None:
        _require(self.prefill_scale >= 0, self, "prefill_scale", "at least 0")
        _require(0 <= self.overlap_credit <= 1, self, "overlap_credit", "between 0 and 1")
        _require(self.request_tokens >= 0, self, "request_tokens", "at least 0")


@dataclass(frozen=True, slots=True)
class Sglang:
    """The cache-aware dispatch of SGLang's gateway.

    Attributes:
        min_share: the instance that has most of the prompt is chosen if this is more than that.
        max_difference: numbers of requests that differ by more than this,
        max_ratio: and by more than this factor, go before caches.
    """

    min_share: float = 0.5
    max_difference: int = 32
    max_ratio: float = 1.1

    def __post_init__(self) -> None:
        _require(0 <= self.min_share <= 1, self, "min_share", "between 0 and 1")
        _require(self.max_difference >= 0, self, "max_difference", "at least 0")
        _require(self.max_ratio >= 1, self, "max_ratio", "at least 1")


@dataclass(frozen=True, slots=True)
class ProductionStack:
    """The load-aware dispatch of vLLM's production stack.

    Attributes:
        load_weight: weight of the number of requests, relative to its mean, against the cached
            share of the prompt.
    """

    load_weight: float = 1.0

    def __post_init__(self) -> None:
        _require(self.load_weight >= 0, self, "load_weight", "at least 0")


@dataclass(frozen=True, slots=True)
class Soonest:
    """Sterna's dispatch: where the request has its first tokens soonest and delays others least.

    All times are in those of a prompt's token, by what engines have in common: for those whose step
    times were measured (`engine.emulated.profiles`) the three costs below are 0.000004 to 0.00006,
    0.3 to 1.4 and 0.0016 to 0.006.

    Attributes:
        horizon_steps: decode steps that count beside the time to the first token.
        others_weight: weight of a delay of another request against the same delay of this one.
        backlog_tokens: delays of others count double where prompts of this many tokens queue
            already, three times where twice as many do, and so on, since they add up.
        eviction_weight: weight of the contents that a prompt takes the place of. They count the
            more, the more its instance has had to compute than others: its contents have been in
            use more recently.
        pair_cost: a pair of tokens that attend to each other, in a prompt.
        request_cost: a request of the batch, in a decode step.
        kv_token_cost: a token of the KV cache, in a decode step.
        looks_at_caches: whether it knows what the prefix caches have; engines may have none.
        copy_token_cost: a token of the KV cache that is copied from another instance: 0.6 to 1.0.
            What only another instance has of a prompt is copied where that takes less than to
            compute it. None: nothing is copied.
        copy_start_cost: the wait for a copy besides: for the ends of the steps under way on both
            instances, and several times that, since a copy holds memory on both.
    """

    horizon_steps: float = 32.0
    others_weight: float = 0.25
    backlog_tokens: float = 4_000.0
    eviction_weight: float = 8.0
    pair_cost: float = 3e-5
    request_cost: float = 0.6
    kv_token_cost: float = 0.003
    looks_at_caches: bool = True
    copy_token_cost: float | None = None
    copy_start_cost: float = 8_000.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            _require(value is None or value >= 0, self, each.name, "at least 0")
        _require(self.backlog_tokens > 0, self, "backlog_tokens", "positive")


PrefixDispatch = LlmD | Dynamo | Sglang | ProductionStack | Soonest
"""Rules that look at prefix caches."""

PREFIX_RULES: Mapping[str, type[PrefixDispatch]] = MappingProxyType(
    {
        "llm-d": LlmD,
        "dynamo": Dynamo,
        "sglang": Sglang,
        "production-stack": ProductionStack,
        "soonest": Soonest,
    }
)
"""These rules by name."""


def prefix_rule_name(rule: PrefixDispatch) -> str:
    """The name by which options choose the rule."""
    return next(name for name, each in PREFIX_RULES.items() if isinstance(rule, each))


class OwnDecisions(Protocol):
    """Decisions of a custom policy class (`policy.own.Policy`), whose types are those of the
    policies' room."""

    looks_at_prefixes: bool

    @property
    def chooses_instances(self) -> bool:
        """Whether it has a rule of dispatch; otherwise it is that of the rules beside it."""

    @property
    def makes_pairs(self) -> bool:
        """Whether it makes pairs at all; otherwise the rules beside it do."""

    @property
    def chooses_victims(self) -> bool:
        """Whether it has an order of moves; otherwise it is that of the rules beside it."""

    def with_fresh_state(self, config: "PolicyConfig") -> "OwnDecisions":
        """An object that remembers nothing, beside these rules."""

    def begin_round(self, known: Any) -> None:
        """A round of the scheduler begins, in which this is known besides the instances."""

    def dispatch(self, request: Any, instances: Any) -> InstanceId:
        """See `policy.dispatch`."""

    def pair(self, instances: Any) -> Mapping[InstanceId, InstanceId]:
        """See `policy.pairing`."""

    def victims(self, instance: InstanceView) -> Sequence[RequestView]:
        """See `policy.selection`."""

    def num_instances(self, instances: Any, num_starting: int, scaling: Any) -> int | None:
        """See `policy.scaling`."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Rules and thresholds of the global scheduler and the llumlets (Section 4.4).

    Attributes:
        migrates: whether pairing rounds are held.
        has_priorities: whether priorities give headroom and order; otherwise all count as normal.
        source_freeness_steps: an instance below this freeness is a migration source.
        destination_freeness_steps: an instance above it is a migration destination.
        round_interval_s: time between two pairing rounds, and at least a second for each 2,560
            instances.
        num_concurrent_migrations: migrations that one instance takes part in at once, a side.
        target_load_tokens: for each execution priority with a headroom, the real load that
            keeps the ideal decode speed (1,600 for LLaMA-7B on A10, Section 6.4); the headroom
            is M less this.
        shares_headroom: whether a headroom counts only as far as the other instances can take the
            requests that it keeps away (`policy.headroom`).
        counts_dispatched: whether requests that the scheduler has dispatched to an instance count
            there before a report shows them.
        batch_counts_queue: whether dispatching divides by all running and queuing requests, in
            place of the running ones and one for the queue.
        divides_overload: whether a negative numerator of the freeness is divided, too.
        pairs_only_to_gain: whether a pair is made only if its next move helps (`move_helps`).
        preempted_make_source: whether an instance where preempted requests queue is a source
            and never a destination, whatever its freeness.
        binds_late: whether requests wait at the scheduler until an instance has memory for them,
            those of a class with the smallest demand first.
        ageing_tokens_per_s: for every second of such waiting a request counts as so much smaller,
            so that small ones that come later are not always before it in line.
        reserves_after_s: the first request in line that has waited for this time and fits nowhere
            keeps free, of the instances that could hold it, the one with most memory: requests
            behind it do not get it until it fits there. One of a class above the normal one does so
            at once. None: none does, and a large one may wait for as long as smaller ones fill each
            instance.
        growth_steps: such a request needs memory beside what all requests on its instance, running,
            queuing or on their way, may need for as many decode steps; an instance without any
            takes whatever fits.
        crowded_share: it does so only while the demands of all in line (requests that wait for
            their prefix are not) are more than this share of the memory of all instances: with
            fewer, whatever is let in shortens the line; with more there is always another one to
            fill the memory with. Moves for balance always leave memory to grow.
        hold_limit_s: after this time of waiting a request is dispatched all the same; None: it
            waits as long as it takes.
        holds_by_uncached: whether the demand of a waiting request counts without what a prefix
            cache has of its prompt: that may be evicted meanwhile, and takes no time to compute.
        awaits_prefix: whether a request for which an instance has memory waits on, if those that
            have most of its prompt have none; until it has aged by what that would save
            (`ageing_tokens_per_s`). What they have is looked at when the wait begins. One of a
            class above the normal one does not wait.
        migrates_continuously: whether a source moves the next request as soon as one has moved, in
            place of waiting for the next round.
        num_session_copies: prefixes of sessions that are copied in each round ahead of their next
            turns, from instances on which these would wait to others (`prefix_dispatch`).
        balance_ratio: requests also move while memory is plenty, for the speed of decoding: from
            an instance whose load, divided by that which another would have with the next request
            to move, exceeds this; None: only by freeness.
        balance_after_tokens: those that move for balance have generated as many tokens since they
            came to their instance, so that they are likely to run long enough to be worth it, and
            do not move too often; those with most output go first.
        balance_horizon_steps: the loads that are balanced are those expected in as many decode
            steps, by the outputs that have ended on the instance (`policy.survival`), and the
            request that will have most of it moves first; None: those of now, and the longest
            output.
        own: decides in place of the rules above.
    """

    name: str
    dispatch: DispatchRule | PrefixDispatch = DispatchRule.FREEST
    migrates: bool = True
    has_priorities: bool = True
    queue_demand: QueueDemand = QueueDemand.HEAD
    victim: Victim = Victim.SHORTEST
    source_freeness_steps: float = 48.0
    destination_freeness_steps: float = 48.0
    round_interval_s: float = 0.2
    num_concurrent_migrations: int = 1
    target_load_tokens: Mapping[Priority, int] = field(
        default_factory=lambda: MappingProxyType({HIGH: 1600})
    )
    shares_headroom: bool = False
    counts_dispatched: bool = True
    batch_counts_queue: bool = False
    divides_overload: bool = False
    pairs_only_to_gain: bool = True
    preempted_make_source: bool = False
    migrates_continuously: bool = True
    binds_late: bool = False
    ageing_tokens_per_s: float = 2048.0
    reserves_after_s: float | None = None
    growth_steps: float = 0.0
    crowded_share: float = 0.0
    hold_limit_s: float | None = None
    holds_by_uncached: bool = False
    awaits_prefix: bool = False
    num_session_copies: int = 0
    balance_ratio: float | None = None
    balance_after_tokens: int = 1024
    balance_horizon_steps: int | None = None
    own: OwnDecisions | None = None

    @property
    def looks_at_prefixes(self) -> bool:
        """Whether decisions depend on what the prefix caches of the instances have."""
        if self.own is not None and self.own.looks_at_prefixes:
            return True
        if isinstance(self.dispatch, Soonest):
            return self.dispatch.looks_at_caches
        return isinstance(self.dispatch, PrefixDispatch)

    @property
    def needs_prefixes(self) -> bool:
        """Whether it is made for prefix caches. Sterna's rule does without, and so does a class
        with its rules that looks at none itself."""
        class_looks = self.own is not None and self.own.looks_at_prefixes
        return class_looks or not isinstance(self.dispatch, DispatchRule | Soonest)

    def with_fresh_state(self) -> "PolicyConfig":
        """The same policy; a custom class in it remembers nothing."""
        if self.own is None:
            return self
        return replace(self, own=self.own.with_fresh_state(replace(self, own=None)))

    def counts_as(self, priority: Priority) -> Priority:
        """The priority that this policy sees: `priority` itself, or normal without priorities."""
        return priority if self.has_priorities else NORMAL

    def __post_init__(self) -> None:
        _require(
            self.source_freeness_steps <= self.destination_freeness_steps,
            self,
            "source_freeness_steps",
            "at most {}",
            Setting.of(self, "destination_freeness_steps"),
        )
        _require(self.round_interval_s > 0, self, "round_interval_s", "positive")
        _require(
            self.num_concurrent_migrations >= 1, self, "num_concurrent_migrations", "at least 1"
        )
        _require(self.ageing_tokens_per_s >= 0, self, "ageing_tokens_per_s", "at least 0")
        _require(self.growth_steps >= 0, self, "growth_steps", "at least 0")
        _require(self.crowded_share >= 0, self, "crowded_share", "at least 0")
        _require(self.num_session_copies >= 0, self, "num_session_copies", "at least 0")
        if self.balance_ratio is not None:
            _require(self.balance_ratio >= 1, self, "balance_ratio", "at least 1")
        _require(self.balance_after_tokens >= 0, self, "balance_after_tokens", "at least 0")
        if self.balance_horizon_steps is not None:
            _require(self.balance_horizon_steps >= 1, self, "balance_horizon_steps", "at least 1")
        if self.reserves_after_s is not None:
            _require(self.reserves_after_s >= 0, self, "reserves_after_s", "at least 0")
        if self.hold_limit_s is not None:
            _require(self.hold_limit_s > 0, self, "hold_limit_s", "positive")
        for priority, target in self.target_load_tokens.items():
            if target <= 0:
                raise ConfigurationError(
                    f"target_load_tokens of priority {priority} must be positive, not {target}"
                )
            if priority <= NORMAL:
                raise ConfigurationError(
                    f"a priority with a target load must be above normal (0), not {priority}"
                )


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Limits and thresholds of auto-scaling (Section 4.4.3, auto-scaling).

    Attributes:
        min_instances: smallest number of instances that take requests.
        max_instances: largest number at once, including starting instances, and terminating ones
            until they are empty.
        low_freeness_steps: x; below this average freeness instances are added. The paper's 10
            (Section 6.5) is in blocks a request: 160 decode steps.
        high_freeness_steps: y; above this average freeness an instance is terminated. The
            paper's 60 blocks a request.
        period_s: time for which the average must stay outside [x, y] before each decision.
        is_sustained: whether the average must stay outside for the whole period; otherwise its
            value at the end of each period decides (the paper's runs).
        cooldown_s: time for which no instance is terminated after a decision and the starts that it
            led to.
        starved_after_s: a request that waits at the scheduler for this time (late binding) has an
            instance started at once. Until then, requests that end or move may make room for it.
        terminates_newest: whether the instance of the largest id is terminated, in place of the
            one with the fewest running requests (the paper's runs).
    """

    min_instances: int = 1
    max_instances: int = 16
    low_freeness_steps: float = 160.0
    high_freeness_steps: float = 960.0
    period_s: float = 10.0
    is_sustained: bool = True
    cooldown_s: float = 0.0
    starved_after_s: float = 3.0
    terminates_newest: bool = False

    def __post_init__(self) -> None:
        _require(self.min_instances >= 1, self, "min_instances", "at least 1")
        _require(
            self.max_instances >= self.min_instances,
            self,
            "max_instances",
            "at least {}",
            Setting.of(self, "min_instances"),
        )
        _require(
            self.low_freeness_steps < self.high_freeness_steps,
            self,
            "low_freeness_steps",
            "below {}",
            Setting.of(self, "high_freeness_steps"),
        )
        _require(self.period_s > 0, self, "period_s", "positive")
        _require(self.cooldown_s >= 0, self, "cooldown_s", "at least 0")
        _require(self.starved_after_s >= 0, self, "starved_after_s", "at least 0")


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """Limits of one migration (Section 4.2).

    Attributes:
        last_stage_max_blocks: largest stage that may be the last, for which the request is drained,
            while full blocks remain.
        last_stage_max_bytes: bytes on one rank of the largest such stage. Blocks of models with
            recurrent layers are large: they hold a thousand tokens or more.
        max_stages: a migration that is not in its last stage by then aborts.
        lease_s: a source gives a stage up, and a destination its reservation, after this time
            without a message of the migration. None comes while either waits for the end of a step.
        query_interval_s: time between two queries of a source that waits for a commit's verdict.
    """

    last_stage_max_blocks: int = 2
    last_stage_max_bytes: int = 32 << 20
    max_stages: int = 8
    lease_s: float = 30.0
    query_interval_s: float = 1.0

    def __post_init__(self) -> None:
        _require(self.last_stage_max_blocks >= 1, self, "last_stage_max_blocks", "at least 1")
        _require(self.last_stage_max_bytes >= 0, self, "last_stage_max_bytes", "at least 0")
        _require(self.max_stages >= 2, self, "max_stages", "at least 2")
        _require(self.lease_s > 0, self, "lease_s", "positive")
        _require(self.query_interval_s > 0, self, "query_interval_s", "positive")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Transport of KV bytes between instances (Section 5, KV cache transfer).

    Attributes:
        kind: "gloo", "tcp" or "shm".
        host: the address on which this instance listens for its peers.
        chunk_bytes: approximate size of the chunks in which a stage is gathered, sent and
            scattered.
        bandwidth_share: the fraction of time for which a bulk copy may keep the memory bus
            busy, in (0, 1]; the rest is left to the engine's steps. Last stages and prefixes are
            not limited: requests wait for them.
        timeout_s: a transfer that moves no bytes for this time has failed.
        begin_timeout_s: a transfer that its source does not begin within this time has failed. The
            destination, and then the source of a last stage, finish the steps under way first.
        idle_timeout_s: a connection that had nothing to send for this time is closed, and opened
            again when there is something: it has memory and a thread at both ends.
    """

    kind: str = "shm"
    host: str = "127.0.0.1"
    chunk_bytes: int = 4 << 20
    bandwidth_share: float = 0.5
    timeout_s: float = 5.0
    begin_timeout_s: float = 30.0
    idle_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _require(self.kind in ("gloo", "tcp", "shm"), self, "kind", "gloo, tcp or shm")
        _require(self.chunk_bytes > 0, self, "chunk_bytes", "positive")
        _require(0 < self.bandwidth_share <= 1, self, "bandwidth_share", "in (0, 1]")
        _require(self.timeout_s > 0, self, "timeout_s", "positive")
        _require(self.begin_timeout_s > 0, self, "begin_timeout_s", "positive")
        _require(self.idle_timeout_s > 0, self, "idle_timeout_s", "positive")


@dataclass(frozen=True, slots=True)
class LlumletConfig:
    """Reports and migrations of a llumlet.

    Attributes:
        report_interval_s: time between two load reports, longer in proportion above 128 instances;
            a report also goes out at once when a request has ended, or the number of queuing
            requests or the migrations in flight change. With None it sends no reports, and its
            shell reads the loads (`simulator`).
        heartbeat_interval_s: time between two reports when nothing changes.
        retry_backoff_s: time for which a request is not chosen again after its migration aborted.
        drain_limit_s: requests that are left on an instance after it has been emptied for this time
            move without their KV cache, which is computed again; None: they wait for memory
            elsewhere.
        hands_back: whether requests that are left then and will never migrate are handed back to
            their front ends, which send them to another instance after the tokens that their
            clients have. Otherwise they stay until they end, as is needed if front ends continue
            no requests (`FrontendConfig`).
    """

    policy: PolicyConfig
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    report_interval_s: float | None = 0.05
    heartbeat_interval_s: float = 1.0
    retry_backoff_s: float = 1.0
    drain_limit_s: float | None = None
    hands_back: bool = True

    def __post_init__(self) -> None:
        if self.report_interval_s is not None:
            _require(self.report_interval_s > 0, self, "report_interval_s", "positive")
            _require(
                self.heartbeat_interval_s >= self.report_interval_s,
                self,
                "heartbeat_interval_s",
                "at least {}",
                Setting.of(self, "report_interval_s"),
            )
        _require(self.retry_backoff_s >= 0, self, "retry_backoff_s", "at least 0")
        if self.drain_limit_s is not None:
            _require(self.drain_limit_s > 0, self, "drain_limit_s", "positive")


class OnInstanceFailure(Enum):
    """Treatment of requests whose instance dies."""

    CONTINUE = "continue"
    """They go on elsewhere, after the tokens that their clients have."""
    ABORT = "abort"
    """They fail, as in the paper (Section 5, fault tolerance)."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """Limits of a front end for its clients.

    Attributes:
        max_queued_requests: requests of the cluster that wait for their first token, each prompt
            and each choice counted; further ones are refused. None for no limit.
        urgent_reserve: further requests above the normal class that are admitted, as a fraction of
            this limit.
        max_body_bytes: size of one request's body; a larger one is refused.
        max_waiting_body_bytes: total size of the bodies of requests at one front end whose answers
            have not begun; a request that would exceed it is refused.
        body_timeout_s: a request whose body is incomplete after this time is refused.
        handshake_timeout_s: a connection that has not agreed upon TLS after this time is cut.
        head_timeout_s: a connection without a whole request line and headers after this time is
            cut.
        reader_timeout_s: a connection whose client hardly reads its answer for this time is cut.
        resume_window_s: time for which streams are kept for clients that reconnect; None keeps
            none.
        max_kept_bytes: total size of the streams that are kept; their records may take as much
            again.
        has_server_timing: whether answers have a `Server-Timing` header.
    """

    max_queued_requests: int | None = 2048
    urgent_reserve: float = 0.1
    max_body_bytes: int = 64 << 20
    max_waiting_body_bytes: int = 1 << 30
    body_timeout_s: float = 300.0
    handshake_timeout_s: float = 10.0
    head_timeout_s: float = 60.0
    reader_timeout_s: float = 60.0
    resume_window_s: float | None = None
    max_kept_bytes: int = 256 << 20
    has_server_timing: bool = True

    def __post_init__(self) -> None:
        if self.max_queued_requests is not None:
            _require(self.max_queued_requests >= 1, self, "max_queued_requests", "at least 1")
        _require(
            self.max_waiting_body_bytes >= self.max_body_bytes,
            self,
            "max_waiting_body_bytes",
            "at least {}",
            Setting.of(self, "max_body_bytes"),
        )
        _require(self.urgent_reserve >= 0, self, "urgent_reserve", "at least 0")
        for limit in (
            "max_body_bytes",
            "body_timeout_s",
            "handshake_timeout_s",
            "head_timeout_s",
            "reader_timeout_s",
        ):
            _require(getattr(self, limit) > 0, self, limit, "positive")
        if self.resume_window_s is not None:
            _require(self.resume_window_s > 0, self, "resume_window_s", "positive")
        _require(self.max_kept_bytes > 0, self, "max_kept_bytes", "positive")


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Timeouts of a front end's requests, and its reaction to the death of an instance.

    Attributes:
        scheduler_timeout_s: a request for which the scheduler names no instance in this time is
            sent by the front end's own rule (Section 5, fault tolerance: the scheduler is
            bypassed).
        scheduler_retry_s: time until a scheduler that did not answer is asked again.
        on_instance_failure: treatment of requests whose instance dies.
        hold_timeout_s: a request fails after this time without any instance.
        owner_retry_s: time between two queries, after a death, to an instance that may be about to
            get a request; for `CONTINUE`.
        owner_timeout_s: a request whose instance died fails when no other instance claims it in
            this time; for `ABORT`.
        gap_timeout_s: tokens that are missing before received ones are lost after this time: the
            request goes on behind those that its client has, or fails.
        trial_timeout_s: requests that several instances may have died of go on one at a time; the
            next one waits for the one before for this time at most; for `CONTINUE`.
        admin_timeout_s: an operator's query to instances or scheduler fails after this time.
        shutdown_timeout_s: open connections are cut at this time after the order to stop.
        door: limits for its clients.
    """

    scheduler_timeout_s: float = 0.5
    scheduler_retry_s: float = 2.0
    hold_timeout_s: float = 60.0
    owner_retry_s: float = 0.25
    owner_timeout_s: float = 1.0
    gap_timeout_s: float = 2.0
    trial_timeout_s: float = 10.0
    admin_timeout_s: float = 30.0
    shutdown_timeout_s: float = 3.0
    on_instance_failure: OnInstanceFailure = OnInstanceFailure.CONTINUE
    door: DoorConfig = field(default_factory=DoorConfig)

    def __post_init__(self) -> None:
        for timeout in (
            "scheduler_timeout_s",
            "scheduler_retry_s",
            "hold_timeout_s",
            "owner_retry_s",
            "owner_timeout_s",
            "gap_timeout_s",
            "trial_timeout_s",
            "admin_timeout_s",
            "shutdown_timeout_s",
        ):
            _require(getattr(self, timeout) > 0, self, timeout, "positive")


@dataclass(frozen=True, slots=True)
class MailboxKeys:
    """The key pair by which the mailboxes of one run authenticate each other, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """Timeouts after which a member counts as failed and is killed (`failure_detector`).

    Attributes:
        instance_timeout_s: for an instance whose process runs, and that sends no heartbeats.
        step_timeout_s: for an instance whose engine has work and ends no step. A step that is only
            long is no hang: a long prompt on a CPU may take minutes.
        stopped_timeout_s: for an instance whose process is stopped (SIGSTOP).
        lease_s: an instance on another node that has had no answer of its supervisor for this time
            ends itself (`lease`). A supervisor must have a successor by then.
        own_pause_s: a longer pause of the watcher itself does not count for any member.
    """

    instance_timeout_s: float = 10.0
    step_timeout_s: float = 120.0
    stopped_timeout_s: float = 0.2
    own_pause_s: float = 1.0
    lease_s: float = 20.0

    def __post_init__(self) -> None:
        # A heartbeat that is only late on a busy machine must not count.
        _require(self.instance_timeout_s >= 1, self, "instance_timeout_s", "at least 1 second")
        _require(self.step_timeout_s >= 1, self, "step_timeout_s", "at least 1 second")
        _require(self.lease_s >= 2, self, "lease_s", "at least 2 seconds")
        for timeout in ("stopped_timeout_s", "own_pause_s"):
            _require(getattr(self, timeout) > 0, self, timeout, "positive")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The cluster that `sterna serve` starts.

    Attributes:
        num_gpus_per_instance: requested from Ray for each instance; 0 on CPU.
        cpus_per_instance: requested from Ray for each instance; 0 for no limit.
        num_warm_instances: further instances that are kept ready, without requests.
        scaling: auto-scaling; None keeps the number of instances.
        watch: timeouts of the failure detector.
        internal_host: the address on which the actors listen for each other; None for that of the
            node on which each of them runs.
        mailbox_keys: keys of the mailboxes; drawn for each run.
    """

    llumlet: LlumletConfig
    transport: TransportConfig
    frontend: FrontendConfig
    num_instances: int = 2
    num_frontends: int = 1
    num_gpus_per_instance: int = 0
    cpus_per_instance: float = 0.0
    num_warm_instances: int = 0
    scaling: ScalingConfig | None = None
    watch: WatchConfig = field(default_factory=WatchConfig)
    internal_host: str | None = LOOPBACK
    mailbox_keys: MailboxKeys | None = field(default=None, repr=False)
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        _require(self.num_instances >= 1, self, "num_instances", "at least 1")
        _require(self.num_frontends >= 1, self, "num_frontends", "at least 1")
        _require(self.cpus_per_instance >= 0, self, "cpus_per_instance", "at least 0")
        _require(self.num_warm_instances >= 0, self, "num_warm_instances", "at least 0")
        if self.scaling is not None:
            _require(
                self.scaling.min_instances <= self.num_instances <= self.scaling.max_instances,
                self,
                "num_instances",
                "between {} and {}",
                Setting.of(self.scaling, "min_instances"),
                Setting.of(self.scaling, "max_instances"),
            )
