"""Recorder of a simulated cluster's migrations, memory and instances. Pure."""

from dataclasses import dataclass, field

from sterna.metrics.summary import fragmentation_proportion
from sterna.types import InstanceId, MigrationId


@dataclass(slots=True)
class Recorder:
    """Times, counts and samples, in the order in which they happen."""

    num_committed: int = 0
    num_aborted: int = 0
    drained_s: dict[MigrationId, float] = field(default_factory=dict)
    downtimes_s: list[float] = field(default_factory=list)
    sample_s: list[float] = field(default_factory=list)
    proportions: list[float] = field(default_factory=list)
    free_tokens: list[int] = field(default_factory=list)
    room_tokens: list[int] = field(default_factory=list)
    total_tokens: list[int] = field(default_factory=list)
    blocked_demands_tokens: list[tuple[int, ...]] = field(default_factory=list)
    instances_s: list[float] = field(default_factory=list)
    num_instances: list[int] = field(default_factory=list)
    migrating_since_s: dict[InstanceId, float] = field(default_factory=dict)
    migrating_s: float = 0.0

    def sample(
        self,
        now_s: float,
        free_tokens: int,
        room_tokens: int,
        demands_tokens: list[int],
        total_tokens: int,
    ) -> None:
        """Add a sample of the memory, with the demands of requests that do not fit."""
        proportion = fragmentation_proportion(room_tokens, demands_tokens, total_tokens)
        self.sample_s.append(now_s)
        self.proportions.append(proportion)
        self.free_tokens.append(free_tokens)
        self.room_tokens.append(room_tokens)
        self.total_tokens.append(total_tokens)
        self.blocked_demands_tokens.append(tuple(demands_tokens))

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
