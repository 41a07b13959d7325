"""Configuration: one frozen dataclass per component, validated when built. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from sterna.errors import ConfigurationError, InvalidValueError, Setting
from sterna.types import HIGH, NORMAL, Priority

LOOPBACK = "127.0.0.1"
"""Where everything listens of a cluster that is on one machine."""


def _require(holds: bool, owner: object, field: str, rule: str, *others: Setting) -> None:
    if not holds:
        raise InvalidValueError(Setting.of(owner, field), rule, others)


class Victim(Enum):
    """Which request of a source instance moves first, among those of the lowest priority."""

    SHORTEST = "shortest"
    LONGEST = "longest"
    LAST_STARTED = "last_started"
    """The last one of the engine's batch: the one that entered it last, migrated ones included,
    where the batch is in that order (today's vLLM); the one that arrived last, where it is in order
    of priority and arrival, as the paper's engine has it (`Preemption.LATEST_ARRIVED`)."""


class QueueDemand(Enum):
    """Which queuing requests have a virtual usage."""

    HEAD = "head"
    """Only the head of the line (Algorithm 1)."""
    ALL = "all"
    """Every queuing request (INFaaS++, Section 6.1)."""


class DispatchRule(Enum):
    """How a new request finds its instance."""

    FREEST = "freest"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What the global scheduler and the llumlets decide by (Section 4.4).

    Attributes:
        migrates: whether pairing rounds are held.
        has_priorities: whether priorities give headroom and order; else all count as normal.
        source_freeness_steps: an instance below this freeness is a migration source.
        destination_freeness_steps: an instance above it is a migration destination.
        round_interval_s: time between two pairing rounds.
        num_concurrent_migrations: migrations that one instance takes part in at once, a side.
        target_load_tokens: for each execution priority with a headroom, the real load that
            keeps the ideal decode speed (1,600 for LLaMA-7B on A10, Section 6.4); the headroom
            is M less this.
        shares_headroom: whether a headroom counts only as far as the other instances can take the
            requests that it keeps away (`policy.headroom`).
        counts_dispatched: whether the scheduler holds requests against an instance that it has
            dispatched there and no report shows yet.
        batch_counts_queue: whether dispatching divides by running and queuing requests, all of
            them, in place of running ones and one for the queue.
        divides_overload: whether a negative numerator of the freeness is divided, too.
        pairs_only_to_gain: whether a pair is made only if its next move narrows its gap.
        preempted_make_source: whether an instance where preempted requests queue is a source
            and never a destination, whatever its freeness.
        migrates_continuously: whether a source goes on to the next request when one has moved,
            in place of waiting for the next round.
    """

    name: str
    dispatch: DispatchRule = DispatchRule.FREEST
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
    """When instances are added and terminated (Section 4.4.3, auto-scaling).

    Attributes:
        min_instances: never fewer instances that take requests.
        max_instances: never more at once: instances that still start count, and terminating
            ones until they are empty.
        low_freeness_steps: x; below this average freeness instances are added. The paper's 10
            (Section 6.5) is in blocks a request: 160 decode steps.
        high_freeness_steps: y; above this average freeness an instance is terminated. The
            paper's 60 blocks a request.
        period_s: how long the average must stay outside [x, y] before each decision.
        is_sustained: else the average is looked at once a period only, and counts as it is then
            (the paper's runs).
        cooldown_s: after a decision, and after the last start that it led to, no instance is
            terminated for so long.
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


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """How one migration goes (Section 4.2).

    Attributes:
        last_stage_max_blocks: a stage of at most so many blocks may be the last, for which the
            request is drained.
        max_stages: a migration that is not in its last stage by then aborts.
        lease_s: a destination gives a reservation back when nothing was heard of its migration
            for so long.
        query_interval_s: a source that waits for a commit's verdict asks again so often.
    """

    last_stage_max_blocks: int = 2
    max_stages: int = 8
    lease_s: float = 10.0
    query_interval_s: float = 1.0

    def __post_init__(self) -> None:
        _require(self.last_stage_max_blocks >= 1, self, "last_stage_max_blocks", "at least 1")
        _require(self.max_stages >= 2, self, "max_stages", "at least 2")
        _require(self.lease_s > 0, self, "lease_s", "positive")
        _require(self.query_interval_s > 0, self, "query_interval_s", "positive")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How KV bytes travel between instances (Section 5, KV cache transfer).

    Attributes:
        kind: "gloo", "tcp" or "shm".
        host: the address on which this instance listens for its peers.
        chunk_bytes: a stage is gathered, sent and scattered in chunks of about so many bytes.
        bandwidth_share: the fraction of time for which a bulk copy may keep the memory bus
            busy, in (0, 1]; the rest is left to the engine's steps. The last stage is never
            slowed down.
        timeout_s: a transfer without progress for so long has failed.
    """

    kind: str = "shm"
    host: str = "127.0.0.1"
    chunk_bytes: int = 4 << 20
    bandwidth_share: float = 0.5
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _require(self.kind in ("gloo", "tcp", "shm"), self, "kind", "gloo, tcp or shm")
        _require(self.chunk_bytes > 0, self, "chunk_bytes", "positive")
        _require(0 < self.bandwidth_share <= 1, self, "bandwidth_share", "in (0, 1]")
        _require(self.timeout_s > 0, self, "timeout_s", "positive")


@dataclass(frozen=True, slots=True)
class LlumletConfig:
    """How a llumlet reports and migrates.

    Attributes:
        report_interval_s: time between two load reports; a report also goes out at once when
            the number of queuing requests or the migrations in flight change. None: it reports
            nothing by itself; whoever drives it asks for the loads (`simulator`).
        heartbeat_interval_s: a report goes out so often when nothing changes.
        retry_backoff_s: a request whose migration aborted is not chosen again for so long.
        drain_limit_s: what is still on an instance that has been emptied for so long moves
            without its KV cache, which is computed again; None: it waits for memory elsewhere.
        hands_back: what is then left and will never migrate is handed back to its front end, which
            sends it to another instance behind the tokens that its client has. Else it stays until
            it has ended, as where front ends continue nothing (`FrontendConfig`).
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
    """What becomes of the requests that die with their instance."""

    CONTINUE = "continue"
    """They go on elsewhere, behind the tokens that their clients have."""
    ABORT = "abort"
    """They fail, as in the paper (Section 5, fault tolerance)."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """What a front end takes from its clients, and how long it waits for them.

    Attributes:
        max_queued_requests: requests of the cluster that wait for their first token, each prompt
            and each choice counted; further ones are refused. None: no bound.
        urgent_reserve: this fraction more is for requests above the normal class.
        max_body_bytes: of one request; a larger one is refused.
        max_waiting_body_bytes: of all requests at one front end whose answers have not begun; one
            that would exceed it is refused.
        body_timeout_s: a request whose body is not there after so long is refused.
        handshake_timeout_s: a connection that has not agreed upon TLS after so long is cut.
        head_timeout_s: a connection without a whole request line and headers for so long is cut.
        reader_timeout_s: a connection whose client hardly reads its answer for so long is cut.
        resume_window_s: how long streams are kept for clients that come back; None: not at all.
        max_kept_bytes: of all streams that are kept; so many again for their records (`records`).
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
    """How a front end finds instances for its requests, and how long it waits for others.

    Attributes:
        scheduler_timeout_s: a request for which the scheduler names no instance in so long is
            sent by the front end's own rule (Section 5, fault tolerance: the scheduler is
            bypassed).
        scheduler_retry_s: a scheduler that did not answer is not asked again for so long.
        on_instance_failure: what becomes of the requests of an instance that dies.
        hold_timeout_s: a request fails when no instance has been there for so long.
        owner_retry_s: after a death, an instance that may be about to get a request is asked so
            often whether it has; for `CONTINUE`.
        owner_timeout_s: a request whose instance died fails when no other instance claims it in
            so long; for `ABORT`.
        gap_timeout_s: tokens that precede already received ones and do not come in so long are
            lost: the request goes on behind those that its client has, or fails.
        trial_timeout_s: of requests that several instances may have died of, which go on one at a
            time, the next one waits no longer than this for the one before; for `CONTINUE`.
        utility_timeout_s: a call of an engine's method fails after so long.
        admin_timeout_s: an operator's question to instances or scheduler fails after so long.
        shutdown_timeout_s: open connections are cut so long after the server was told to stop.
        door: what it takes from its clients.
    """

    scheduler_timeout_s: float = 0.5
    scheduler_retry_s: float = 2.0
    hold_timeout_s: float = 60.0
    owner_retry_s: float = 0.25
    owner_timeout_s: float = 1.0
    gap_timeout_s: float = 2.0
    trial_timeout_s: float = 10.0
    utility_timeout_s: float = 300.0
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
            "utility_timeout_s",
            "admin_timeout_s",
            "shutdown_timeout_s",
        ):
            _require(getattr(self, timeout) > 0, self, timeout, "positive")


@dataclass(frozen=True, slots=True)
class MailboxKeys:
    """The key pair by which the mailboxes of one run know each other, in ZeroMQ's text (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """After how long a member that works no more is given up and killed (see `progress`).

    Attributes:
        instance_timeout_s: an instance whose process runs, and of which nothing is heard.
        step_timeout_s: an instance whose engine has work and ends no step. A step that is only
            long is no hang: a long prompt on a CPU may take minutes.
        stopped_timeout_s: an instance whose process is stopped (SIGSTOP).
        lease_s: an instance on another node that its supervisor has not answered for so long ends
            itself (`lease`). A supervisor must have a successor by then.
        own_pause_s: a watcher that did not run for so long holds that time against nobody.
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
    """What `sterna serve` starts.

    Attributes:
        num_gpus_per_instance: asked of Ray for each instance; 0 on CPU.
        cpus_per_instance: asked of Ray for each instance; 0: as many as it likes.
        num_warm_instances: further instances that are kept ready, without requests.
        scaling: how the number of instances follows the load; None: it stays as it is.
        watch: when a member that works no more is given up.
        internal_host: the address on which the actors listen for each other; None: that of the node
            on which each of them runs.
        mailbox_keys: what they ask of each other; drawn anew for each run.
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
