"""Settings of the simulated cluster: its size, and the time that things take in it.

It is small, so that memory runs out, and quick, so that much happens in a few seconds. Time-outs
have the same relation to each other as those of `sterna serve`.
"""

from dataclasses import dataclass, replace

from sterna.config import FrontendConfig, LlumletConfig, MigrationConfig, PolicyConfig, Soonest
from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.emulated.durations import StepTime
from sterna.policy.presets import LLUMNIX

ENGINE = EmulatedEngineConfig(
    num_blocks=40,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=48,
    step_mode=StepMode.CHUNKED,
    preemption=Preemption.LEAST_URGENT,
    keeps_block_free=False,
)

STEP_TIME = StepTime(
    prefill_s=0.02,
    prefill_token_s=0.0005,
    prefill_pair_s=0.0,
    prefill_min_s=0.02,
    decode_s=0.02,
    decode_request_s=0.001,
    decode_token_s=0.0,
)

TICK_S = 0.1
"""The precision of the times of mailboxes' probes and receipts."""

LONG_STEP_SHARE = 0.01
"""Of the steps: those that take `LONG_STEP_FACTOR` times as long, unless a fault makes it more."""

LONG_STEP_FACTOR = 15.0

TELL_S = 0.001
"""Longest time until an instance hears of what its engine did, unless a fault makes it more."""

POLICY: PolicyConfig = replace(
    LLUMNIX,
    source_freeness_steps=12.0,
    destination_freeness_steps=12.0,
    target_load_tokens=dict.fromkeys(LLUMNIX.target_load_tokens, 80),
    shares_headroom=True,
    num_concurrent_migrations=2,
)

BY_PREFIX: PolicyConfig = replace(POLICY, dispatch=Soonest())
"""Dispatches by what the instances report of their prefix caches."""

COPYING: PolicyConfig = replace(POLICY, dispatch=Soonest(copy_token_cost=0.0, copy_start_cost=0.5))
"""Besides, prefixes are copied almost always where another instance has more of them."""

COPYING_SHARE = 0.5
"""Of the seeds whose engines have full attention and a prefix cache: those with that policy,
besides those that would dispatch by prefixes alone."""

SESSION_COPIES_SHARE = 0.5
"""Of the seeds that copy prefixes: those that also copy them ahead of sessions' next turns."""

AHEAD = Soonest(copy_token_cost=0.0, copy_start_cost=0.5, backlog_tokens=8.0)
"""The dispatch of these: turns wait where an instance has a quarter of this backlog to compute."""

BY_PREFIX_SHARE = 0.4
"""Of the seeds whose engines have a prefix cache: those with that policy."""

LATE_SHARE = 0.3
"""Of all seeds: those whose scheduler holds requests until an instance has memory for them."""

AGEING_TOKENS_PER_S = 40.0
"""By this much a second such a request counts as smaller."""

RESERVES_AFTER_S = 0.5
"""After this time such a request keeps an instance free."""

GROWTH_STEPS = 1.0
"""Memory that late binding leaves to each request on an instance."""

LONG_LINE_SHARE = 0.5
"""Of these: those in which it does so only while much waits."""

CROWDED_SHARE = 0.2
"""More than this share of the memory."""

PREFIX_WAITS_SHARE = 0.5
"""Of the same: those in which requests also wait for instances that have their prefixes."""

SLOW_AGEING_TOKENS_PER_S = 8.0
"""The ageing of these, so that a request waits for a beginning that it has in common for up to two
seconds."""

BALANCE_SHARE = 0.3
"""Of all seeds: those in which requests also move while memory is plenty."""

BALANCE_RATIO, BALANCE_AFTER_TOKENS = 1.2, 4
"""With these rules of `PolicyConfig`."""

HORIZON_SHARE = 0.15
"""Of these: those in which the loads that are expected are balanced."""

BALANCE_HORIZON_STEPS = 6
"""The steps until then."""

LLUMLET = LlumletConfig(
    policy=POLICY,
    migration=MigrationConfig(
        last_stage_max_blocks=1, max_stages=6, lease_s=3.0, query_interval_s=0.3
    ),
    retry_backoff_s=0.3,
    drain_limit_s=4.0,
)

FRONTEND = FrontendConfig(
    scheduler_timeout_s=0.5,
    scheduler_retry_s=1.0,
    hold_timeout_s=20.0,
    gap_timeout_s=1.5,
    trial_timeout_s=0.5,
)

RESUMABLE_SHARE = 0.15
"""Of the seeds: those whose front ends have streams that outlive them."""

REPLICA_TIMEOUT_S = 0.5
"""Time for which outputs wait for the front end that keeps the replicas."""

WINDOW_S = 6.0
"""Time for which a stream is kept until its client comes back."""

FIND_S = 5.0
"""Time for which a stream is searched."""

INTRODUCTION_S = 0.1
"""A new front end introduces itself again after this time to those that have not answered."""

UNSEEDED_SHARE = 0.3
"""Of the requests: those without a seed, whose tokens differ each time."""

LEASE_S = 3.0
"""Of the instances on other nodes than their supervisor."""

HEARTBEAT_S = 0.5
"""Time between two heartbeats of those that hold a lease."""

JUDGE_S = 0.2
"""Time between two looks of the supervisor for leases that have ended."""

NOTICE_LEASE_END_S = (0.0, 0.2)
"""Bounds of the time until an instance notices that its lease has ended, unless it acts before."""

COPY_TIMEOUT_S = 1.5
"""A stage that gets no bytes for this time has failed."""

COPY_BLOCK_S = 0.004
"""Time that a copied block takes."""


SHORT_QUEUES_SHARE = 0.2
"""Of the seeds whose streams do not outlive front ends: those in which mailboxes keep little."""

SHORT_FRONTEND_QUEUES = (4, 8, 16)
SHORT_TOKEN_QUEUES = (6, 12, 24)
"""Limits of short queues in messages; one of these is drawn."""

SEND_QUEUE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Queues:
    """How many messages without a receipt mailboxes keep for a peer; what is more is refused.

    Attributes:
        of_frontends: of any messages.
        of_tokens: what an instance keeps where it refuses tokens. Those with which a request ends
            are never refused: nothing would show that they are missing.
    """

    of_frontends: int
    of_tokens: int


WIDE = Queues(100_000, 100_000)
"""As `mailbox` has them."""


@dataclass(frozen=True, slots=True)
class Delays:
    """The times that Ray takes, as bounds between which each one is drawn, in seconds.

    Attributes:
        notice_death_soon: of one death in three.
    """

    start_instance: tuple[float, float] = (0.2, 1.5)
    start_other: tuple[float, float] = (0.1, 0.8)
    notice_death: tuple[float, float] = (0.02, 0.4)
    notice_death_soon: tuple[float, float] = (0.001, 0.02)
    notice_hang: tuple[float, float] = (0.6, 1.0)
    successor: tuple[float, float] = (0.1, 1.0)
    close: tuple[float, float] = (0.0, 0.1)


DELAYS = Delays()
