"""Recorder of a simulated cluster's migrations, memory and instances. Pure."""

from dataclasses import dataclass, field

from sterna.metrics.summary import fragmentation_proportion
from sterna.types import InstanceId, MigrationId


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of all instances at one moment, in tokens.

    Attributes:
        free_tokens: free memory.
        room_tokens: the part of it in which they may admit requests: without each instance's
            watermark.
        largest_room_tokens: that of the instance with most of it.
        demands_tokens: demands of the requests that block the head of a queue because they do not
            fit.
        total_tokens: all of it.
        largest_used_tokens: memory in use on the instance that uses most.
        num_instances: those that are up.
    """

    free_tokens: int
    room_tokens: int
    largest_room_tokens: int
    demands_tokens: list[int]
    total_tokens: int
    largest_used_tokens: int
    num_instances: int

    @property
    def imbalance(self) -> float:
        """The largest memory in use over the mean; NaN while none is."""
        used_tokens = self.total_tokens - self.free_tokens
        if not used_tokens:
            return float("nan")
        return self.largest_used_tokens * self.num_instances / used_tokens


@dataclass(slots=True)
class Recorder:
    """Times, counts and samples, in the order in which they happen."""

    num_committed: int = 0
    num_aborted: int = 0
    num_prefixes_copied: int = 0
    drained_s: dict[MigrationId, float] = field(default_factory=dict)
    downtimes_s: list[float] = field(default_factory=list)
    sample_s: list[float] = field(default_factory=list)
    proportions: list[float] = field(default_factory=list)
    free_tokens: list[int] = field(default_factory=list)
    room_tokens: list[int] = field(default_factory=list)
    total_tokens: list[int] = field(default_factory=list)
    blocked_demands_tokens: list[tuple[int, ...]] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    instances_s: list[float] = field(default_factory=list)
    num_instances: list[int] = field(default_factory=list)
    migrating_since_s: dict[InstanceId, float] = field(default_factory=dict)
    migrating_s: float = 0.0

    def sample(self, now_s: float, memory: MemorySample, held_tokens: int) -> None:
        """Add a sample of the memory.

        Args:
            held_tokens: demand of the first request in line at the scheduler, whose instances are
                all of them; 0 for none.
        """
        demands_tokens = list(memory.demands_tokens)
        if held_tokens > memory.largest_room_tokens:
            demands_tokens.append(held_tokens)
        proportion = fragmentation_proportion(
            memory.room_tokens, demands_tokens, memory.total_tokens
        )
        self.sample_s.append(now_s)
        self.proportions.append(proportion)
        self.free_tokens.append(memory.free_tokens)
        self.room_tokens.append(memory.room_tokens)
        self.total_tokens.append(memory.total_tokens)
        self.blocked_demands_tokens.append(tuple(demands_tokens))
        self.imbalance.append(memory.imbalance)

    def set_num_instances(self, now_s: float, num_instances: int) -> None:
        """Record the number of instances from now on."""
        if self.instances_s and self.instances_s[-1] == now_s:
            self.num_instances[-1] = num_instances
            return
        self.instances_s.append(now_s)
        self.num_instances.append(num_instances)

    def set_migrating(self, instance_id: InstanceId, is_migrating: bool, now_s: float) -> None:
        """Record that from now on the instance takes part in a migration, or in none."""
        if is_migrating:
            self.migrating_since_s.setdefault(instance_id, now_s)
        elif instance_id in self.migrating_since_s:
            since_s = self.migrating_since_s.pop(instance_id)
            self.migrating_s += max(0.0, now_s - since_s)
