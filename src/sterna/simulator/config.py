"""Configuration of a simulation. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from sterna.config import MigrationConfig, PolicyConfig, ScalingConfig
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.errors import ConfigurationError


class Report(Enum):
    """The state of an instance that the global scheduler knows when it decides."""

    LIVE = "live"
    """The instance's state at this moment."""
    STEP = "step"
    """The state at the beginning of the step under way, as real instances report it. These leave
    out what changes within 50 ms of the last report, unless it is the queue, a migration or, with
    late binding, the end of a request."""
    STALE = "stale"
    """The state at the beginning of the last step that has ended, as in the paper's runs: requests
    that were dispatched since then, or arrived during that step, are not in it."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Configuration of one run, without its trace.

    Attributes:
        num_instances: number of instances at the start.
        report: the state that the scheduler knows when it decides.
        scaling: None keeps the number of instances.
        scaling_begins_s: time before which no instance is added or terminated.
        start_delay_s: time from the decision to add an instance until it can serve.
        dispatch_delay_s: time from a request's arrival until it queues on its instance.
        message_delay_s: latency of a message between two llumlets.
        retry_backoff_s: time before a request whose migration aborted is chosen again.
        fragmentation_interval_s: time between two samples of the fragmentation; None: no samples.
        is_fast: whether the compiled engines run; the results are the same.
    """

    engine: EmulatedEngineConfig
    step_time: StepTime
    copy_time: CopyTime
    policy: PolicyConfig
    num_instances: int = 16
    report: Report = Report.LIVE
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    scaling: ScalingConfig | None = None
    scaling_begins_s: float = 0.0
    start_delay_s: float = 0.0
    dispatch_delay_s: float = 0.0
    message_delay_s: float = 0.0015
    retry_backoff_s: float = 1.0
    fragmentation_interval_s: float | None = 1.0
    is_fast: bool = True

    def __post_init__(self) -> None:
        if self.num_instances < 1:
            raise ConfigurationError(f"num_instances must be at least 1, not {self.num_instances}")
        for option in (
            "scaling_begins_s",
            "start_delay_s",
            "dispatch_delay_s",
            "message_delay_s",
            "retry_backoff_s",
        ):
            value = getattr(self, option)
            if value < 0:
                raise ConfigurationError(f"{option} must be at least 0, not {value!r}")
        interval_s = self.fragmentation_interval_s
        if interval_s is not None and interval_s <= 0:
            raise ConfigurationError(
                f"fragmentation_interval_s must be positive or None, not {interval_s!r}"
            )
