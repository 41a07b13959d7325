"""Modules that are mutated, and the tests that must find their mutants.

For each module the tests of its own come first. The wider ones run only over what these have not
found: other tests of the same kind of thing, and some clusters in virtual time.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """One module.

    Attributes:
        tests: arguments of pytest, as are the wider ones.
    """

    module: str
    tests: tuple[str, ...]
    wider: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The arguments of one run of pytest after the other."""
        return (self.tests, self.wider) if self.wider else (self.tests,)

    @property
    def path(self) -> Path:
        """The module's file."""
        return ROOT / "src" / Path(*self.module.split(".")).with_suffix(".py")

    @property
    def source(self) -> str:
        """The text of the module."""
        return self.path.read_text()


_POLICY = (
    "tests/policy",
    "tests/scheduler/test_global_scheduler.py",
    "tests/scheduler/test_global_scheduler_rounds.py",
)
_SCHEDULER = (
    "tests/scheduler/test_global_scheduler.py",
    "tests/scheduler/test_global_scheduler_rounds.py",
    "tests/scheduler/test_core.py",
    "tests/scheduler/test_shell.py",
)
_FLEET = (
    "tests/supervisor/test_fleet.py",
    "tests/supervisor/test_fleet_restart.py",
    "tests/supervisor/test_fleet_world.py",
)
_SUPERVISOR = (
    *_FLEET,
    "tests/supervisor/test_core.py",
    "tests/supervisor/test_failure_detector.py",
    "tests/supervisor/test_lease.py",
    "tests/runtime/supervisor/test_watch.py",
    "tests/fault_simulation/test_leases.py",
    "tests/fault_simulation/test_seeds.py::test_all_promises_are_kept[0]",
)
_DELIVERY = (
    "tests/messaging/test_reliable_channel.py",
    "tests/messaging/test_framing.py",
    "tests/messaging/test_mailbox_core.py",
    "tests/messaging/test_mailbox.py",
)
_HANDSHAKE = (
    "tests/migration/test_effects.py",
    "tests/migration/test_transcripts.py",
    "tests/migration/test_transcripts_aborts.py",
    "tests/migration/test_transcripts_failures.py",
    "tests/migration/test_tables.py",
)
_MIGRATION = (
    "tests/migration",
    "tests/fault_simulation/test_seeds.py::test_all_promises_are_kept[0]",
    "tests/fault_simulation/test_seeds.py::test_all_promises_are_kept[1]",
)
_LLUMLET = (
    "tests/instance/test_llumlet.py",
    "tests/instance/test_llumlet_aborts.py",
    "tests/instance/test_llumlet_draining.py",
    "tests/instance/test_llumlet_ends.py",
    "tests/instance/test_llumlet_reports.py",
)
_CORE = ("tests/instance/test_core.py", "tests/instance/test_core_orders.py")
_INSTANCE = (
    *_LLUMLET,
    *_CORE,
    "tests/instance/test_termination.py",
    "tests/simulator/test_hand_computed.py",
    "tests/simulator/test_scaling.py",
    "tests/simulator/test_priorities.py",
    "tests/fault_simulation/test_seeds.py::test_all_promises_are_kept[0]",
    "tests/fault_simulation/test_seeds.py::test_all_promises_are_kept[1]",
    "tests/fault_simulation/test_seeds.py::test_instances_that_are_emptied_part_from_what_cannot_move",
)

TARGETS = (
    Target("sterna.policy.dispatch", ("tests/policy/test_dispatch.py",), _POLICY),
    Target("sterna.policy.headroom", ("tests/policy/test_headroom.py",), _POLICY),
    Target("sterna.policy.load_report", ("tests/policy/test_virtual_usage.py",), _POLICY),
    Target("sterna.policy.pairing", ("tests/policy/test_pairing.py",), _POLICY),
    Target("sterna.policy.presets", ("tests/policy/test_presets.py",), _POLICY),
    Target("sterna.policy.scaling", ("tests/policy/test_scaling.py",), _POLICY),
    Target("sterna.policy.selection", ("tests/policy/test_selection.py",), _POLICY),
    Target("sterna.policy.survival", ("tests/policy/test_survival.py",), _POLICY),
    Target("sterna.policy.virtual_usage", ("tests/policy/test_virtual_usage.py",), _POLICY),
    Target("sterna.scheduler.global_scheduler", _SCHEDULER[:2], _SCHEDULER),
    Target("sterna.scheduler.known_instances", _SCHEDULER[:2], _SCHEDULER),
    Target("sterna.scheduler.core", ("tests/scheduler/test_core.py",), _SCHEDULER),
    Target("sterna.supervisor.fleet", _FLEET, _SUPERVISOR),
    Target("sterna.supervisor.core", ("tests/supervisor/test_core.py",), _SUPERVISOR),
    Target(
        "sterna.supervisor.failure_detector",
        ("tests/supervisor/test_failure_detector.py",),
        _SUPERVISOR,
    ),
    Target("sterna.supervisor.lease", ("tests/supervisor/test_lease.py",), _SUPERVISOR),
    Target(
        "sterna.messaging.reliable_channel",
        ("tests/messaging/test_reliable_channel.py",),
        _DELIVERY,
    ),
    Target("sterna.messaging.framing", ("tests/messaging/test_framing.py",), _DELIVERY),
    Target("sterna.messaging.mailbox_core", ("tests/messaging/test_mailbox_core.py",), _DELIVERY),
    Target(
        "sterna.migration.coordinator",
        ("tests/migration/test_coordinator.py",),
        _MIGRATION,
    ),
    Target(
        "sterna.migration.destination",
        _HANDSHAKE,
        _MIGRATION,
    ),
    Target(
        "sterna.migration.source",
        _HANDSHAKE,
        _MIGRATION,
    ),
    Target("sterna.migration.stages", ("tests/migration/test_stages.py",), _MIGRATION),
    Target("sterna.instance.core", _CORE, _INSTANCE),
    Target("sterna.instance.admissions", _CORE, _INSTANCE),
    Target("sterna.instance.termination", ("tests/instance/test_termination.py",), _INSTANCE),
    Target("sterna.instance.llumlet", _LLUMLET, _INSTANCE),
)
