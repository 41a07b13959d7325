"""Table of Sterna's own metrics on `/metrics`. Pure.

`scripts/metric_files.py` writes the reference page, the alert rules and the dashboard from it.
"""

from dataclasses import dataclass
from enum import Enum

from sterna.frontend.metrics.latencies import Latency


class Kind(Enum):
    """Prometheus's kinds of metrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name on `/metrics`.

    Attributes:
        name: as a server shows it; a counter's ends in `_total`.
        labels: the names of its labels.
        field: of `InstanceStats`, for a gauge of each instance.
        latency: of front ends, for a histogram of each priority class.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    field: str | None = None
    latency: Latency | None = None
    buckets: tuple[float, ...] = ()


def _of_instance(name: str, text: str, field: str) -> Metric:
    return Metric(f"sterna_instance_{name}", Kind.GAUGE, text, ("instance",), field)


def _of_class(name: str, text: str, latency: Latency, *buckets: float) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, ("class",), latency=latency, buckets=buckets)


INSTANCES = (
    _of_instance("running_requests", "Requests in the batch.", "num_running"),
    _of_instance("queuing_requests", "Requests that wait for memory there.", "num_queuing"),
    _of_instance("used_tokens", "KV cache memory in use, in tokens.", "used_tokens"),
    _of_instance("total_tokens", "KV cache memory, in tokens.", "total_tokens"),
    _of_instance(
        "head_demand_tokens",
        "Memory that the first of the waiting requests needs, in tokens.",
        "head_demand_tokens",
    ),
    _of_instance(
        "freeness_steps",
        "Decode steps for which the batch has memory, less what is kept free beside requests of "
        "high priority; negative when overloaded; none while it is emptied.",
        "freeness_steps",
    ),
    _of_instance("outgoing_migrations", "Requests that are moving away.", "num_migrating_out"),
    _of_instance("incoming_migrations", "Requests that are moving in.", "num_migrating_in"),
    _of_instance(
        "committed_migrations",
        "Requests that moved away since the instance started.",
        "num_committed",
    ),
    _of_instance(
        "aborted_migrations",
        "Requests that began to move away since the instance started, and stayed.",
        "num_aborted",
    ),
    _of_instance(
        "preemptions",
        "Times that a request's memory was taken back since the instance started.",
        "num_preemptions",
    ),
    _of_instance(
        "sent_bytes",
        "Bytes of KV caches sent to other instances since the instance started; 0 of emulated "
        "engines.",
        "num_sent_bytes",
    ),
    _of_instance(
        "prefix_tokens",
        "Tokens looked up in the prefix cache since the instance started.",
        "num_prefix_tokens",
    ),
    _of_instance(
        "prefix_hit_tokens",
        "Tokens found in the prefix cache since the instance started.",
        "num_prefix_hits",
    ),
)

INSTANCE_STATES = ("running", "terminating", "starting", "pending", "warm")
"""Values of the label `state`, as in `sterna instances`."""

WANTED = Metric(
    "sterna_wanted_instances",
    Kind.GAUGE,
    "Instances that should take requests; those of the warm pool come on top.",
)

PRESENT = Metric(
    "sterna_instances",
    Kind.GAUGE,
    "Instances that take requests (`running`), are being emptied (`terminating`), start "
    "(`starting`), wait for a place to start on (`pending`), or are up in the warm pool (`warm`).",
    ("state",),
)

HELD = Metric(
    "sterna_held_requests",
    Kind.GAUGE,
    "Requests that wait at the scheduler for an instance; vLLM's waiting requests include them.",
)

FRAGMENTATION = Metric(
    "sterna_fragmentation_ratio",
    Kind.GAUGE,
    "Free memory that requests at the heads of queues, the scheduler's too, could have if it were "
    "in one piece, over all memory (the paper's Section 6.3).",
)

RUNNING = Metric(
    "sterna_running_requests",
    Kind.GAUGE,
    "Requests in the batches of all instances, by execution priority; 0 is normal.",
    ("execution_priority",),
)

USAGE = Metric(
    "sterna_used_tokens",
    Kind.GAUGE,
    "KV cache memory of the requests in the batches of all instances, in tokens, by execution "
    "priority; memory that requests share counts for each of them.",
    ("execution_priority",),
)

SCALING = Metric(
    "sterna_scaling_decisions_total",
    Kind.COUNTER,
    "Instances that auto-scaling has asked for (`up`), and those that it has asked to be ended "
    "(`down`).",
    ("direction",),
)

REQUESTS = Metric(
    "sterna_requests_total", Kind.COUNTER, "Requests of each priority class.", ("class",)
)

SENT_AGAIN = Metric(
    "sterna_requests_sent_again_total",
    Kind.COUNTER,
    "Times that a request was sent again, and went on after the tokens that its client had: its "
    "instance died or handed it back, or tokens were lost on their way.",
)

MIGRATIONS = Metric(
    "sterna_migrations_total",
    Kind.COUNTER,
    "Migrations that ended, by outcome (committed, or the reason why the request stayed) and by "
    "cause: that of the scheduler (memory, headroom, preemption, emptying, balance, policy), "
    "operator, or unknown.",
    ("outcome", "cause"),
)

DOWNTIME = Metric(
    "sterna_migration_downtime_seconds",
    Kind.HISTOGRAM,
    "Time for which a request that moved was in no batch.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)

STAGES = Metric(
    "sterna_migration_stages",
    Kind.HISTOGRAM,
    "Stages in which the KV cache of a request that moved was copied.",
    buckets=(1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
)

LATENCIES = (
    _of_class(
        "sterna_dispatch_latency_seconds",
        "From when a request came to when it was sent to an instance, by priority class; the time "
        "for which the scheduler held it is included.",
        Latency.DISPATCH,
        *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 50.0, 250.0),
    ),
    _of_class(
        "sterna_time_to_first_token_seconds",
        "From when a request came to its first token, by priority class.",
        Latency.FIRST_TOKEN,
        *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
    ),
    _of_class(
        "sterna_inter_token_latency_seconds",
        "From one token to the next, by priority class; pauses of every kind are included.",
        Latency.INTER_TOKEN,
        *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    _of_class(
        "sterna_request_latency_seconds",
        "From when a request came to its last token, by priority class.",
        Latency.REQUEST,
        *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0),
    ),
    _of_class(
        "sterna_preemption_loss_seconds",
        "From when an instance took a running request's memory back to its next token, by priority "
        "class.",
        Latency.PREEMPTION,
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
    ),
    _of_class(
        "sterna_recovery_gap_seconds",
        "From the last token before a request was sent again to the next one, by priority class.",
        Latency.RECOVERY,
        *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
    ),
)

METRICS = (
    *INSTANCES,
    *(WANTED, PRESENT, HELD, FRAGMENTATION, RUNNING, USAGE, REQUESTS, SENT_AGAIN, SCALING),
    *(MIGRATIONS, DOWNTIME, STAGES, *LATENCIES),
)
"""All of them, in the order of the reference page."""
