"""Sterna's metrics of the instances."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import mark_process_dead

from sterna.frontend.metrics.latencies import Latency
from sterna.frontend.metrics.prometheus import EngineCounts, EngineGrowth, FrontendMetrics
from sterna.messages.actors import (
    Absent,
    ClusterStats,
    InstanceMember,
    InstanceStats,
    Membership,
    MigrationEnd,
)
from sterna.types import InstanceId, Priority


def stats_of(instance_id: str, used_tokens: int) -> InstanceStats:
    return InstanceStats(InstanceId(instance_id), 2, 1, used_tokens, 1000, 45.5, 1, 0)


def test_every_instance_has_its_own_series_and_the_last_report_holds():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)

    metrics.show(ClusterStats((stats_of("i0", 96), stats_of("i1", 64))))
    metrics.show(ClusterStats((stats_of("i0", 128), stats_of("i1", 64))))

    assert registry.get_sample_value("sterna_instance_used_tokens", {"instance": "i0"}) == 128
    assert registry.get_sample_value("sterna_instance_used_tokens", {"instance": "i1"}) == 64
    assert registry.get_sample_value("sterna_instance_freeness_steps", {"instance": "i1"}) == 45.5


def test_what_has_happened_since_an_instance_started_is_shown():
    registry = CollectorRegistry()
    stats = InstanceStats(
        InstanceId("i0"), 2, 1, 96, 1000, 45.5, 1, 0, num_committed=5, num_aborted=3,
        num_preemptions=7, num_prefix_tokens=90, num_prefix_hits=64,
    )  # fmt: skip

    FrontendMetrics(registry).show(ClusterStats((stats,)))

    shown = {
        name: registry.get_sample_value(f"sterna_instance_{name}", {"instance": "i0"})
        for name in (
            *("committed_migrations", "aborted_migrations", "preemptions"),
            *("prefix_tokens", "prefix_hit_tokens"),
        )
    }
    assert shown == {
        "committed_migrations": 5,
        "aborted_migrations": 3,
        "preemptions": 7,
        "prefix_tokens": 90,
        "prefix_hit_tokens": 64,
    }


def test_the_instances_that_are_wanted_are_shown_beside_those_in_each_state():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    i0, i1, i2, i3 = (InstanceId(f"i{number}") for number in range(4))

    def shown(membership: Membership) -> list[float | None]:
        metrics.show_members(membership)
        states = ("running", "terminating", "starting", "pending", "warm")
        return [
            registry.get_sample_value("sterna_wanted_instances"),
            *(registry.get_sample_value("sterna_instances", {"state": each}) for each in states),
        ]

    serving = (InstanceMember(i0, ""), InstanceMember(i1, ""), InstanceMember(i2, "", True))
    absent = (Absent(i3, "pending", "no node has a GPU"),)
    assert shown(Membership(1, serving, (), None, absent, num_wanted=4)) == [4, 2, 1, 0, 1, 0]
    absent = (Absent(i3, "starting"), Absent(InstanceId("i4"), "warm"))
    assert shown(Membership(2, serving[:2], (), None, absent, num_wanted=3)) == [3, 2, 0, 1, 0, 1]


def test_what_the_scheduler_holds_is_shown_and_waits():
    registry = CollectorRegistry()
    stats = ClusterStats((stats_of("i0", 96), stats_of("i1", 64)), num_held=5)
    FrontendMetrics(registry).show(stats)
    assert registry.get_sample_value("sterna_held_requests") == 5
    # One queues on each instance.
    assert stats.num_waiting == 7


def test_the_line_of_the_scheduler_counts_in_the_fragmentation():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    instances = (stats_of("i0", 96), stats_of("i1", 64))
    largest = max(each.total_tokens - each.used_tokens for each in instances)

    def shown(head_demand_tokens: int) -> float | None:
        metrics.show(ClusterStats(instances, 1, head_demand_tokens))
        return registry.get_sample_value("sterna_fragmentation_ratio")

    without = shown(0)
    assert shown(largest) == without
    total_tokens = sum(each.total_tokens for each in instances)
    assert without is not None
    assert shown(largest + 1) == pytest.approx(without + (largest + 1) / total_tokens)


def test_requests_that_went_on_elsewhere_are_counted():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    assert registry.get_sample_value("sterna_requests_sent_again_total") == 0
    metrics.count_sent_again(2)
    metrics.count_sent_again(3)
    assert registry.get_sample_value("sterna_requests_sent_again_total") == 5


def test_latencies_are_shown_by_class():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    metrics.observe(
        {
            (Latency.DISPATCH, "high"): [0.002],
            (Latency.FIRST_TOKEN, "high"): [0.02, 0.2],
            (Latency.FIRST_TOKEN, "normal"): [3.0],
            (Latency.INTER_TOKEN, "high"): [0.04],
            (Latency.REQUEST, "high"): [1.5],
        }
    )

    def shown(name: str, class_name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sterna_{name}", {"class": class_name, **labels})

    assert shown("dispatch_latency_seconds_bucket", "high", le="0.0025") == 1
    assert shown("time_to_first_token_seconds_count", "high") == 2
    assert shown("time_to_first_token_seconds_bucket", "high", le="0.1") == 1
    assert shown("time_to_first_token_seconds_sum", "normal") == 3.0
    assert shown("inter_token_latency_seconds_sum", "high") == 0.04
    assert shown("request_latency_seconds_count", "high") == 1


def test_classes_that_are_known_have_series_before_their_first_observation():
    registry = CollectorRegistry()
    FrontendMetrics(registry, ["high"])
    labels = {"class": "high"}
    assert registry.get_sample_value("sterna_recovery_gap_seconds_count", labels) == 0


def test_an_instance_that_is_gone_disappears():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)

    metrics.show(ClusterStats((stats_of("i0", 96), stats_of("i1", 64))))
    metrics.show(ClusterStats((stats_of("i1", 64),)))

    assert registry.get_sample_value("sterna_instance_used_tokens", {"instance": "i0"}) is None


def test_an_instance_that_is_emptied_has_no_freeness():
    """Minus infinity would make the sum and the average of all instances infinite."""
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)

    def shown(freeness_steps: float) -> list[float | None]:
        i0 = structs.replace(stats_of("i0", 96), freeness_steps=freeness_steps)
        metrics.show(ClusterStats((i0, stats_of("i1", 64))))
        return [
            registry.get_sample_value(f"sterna_instance_{name}", {"instance": each})
            for name, each in (("freeness_steps", "i0"), ("used_tokens", "i0"))
        ]

    assert shown(-math.inf) == [None, 96]
    assert shown(12.5) == [12.5, 96]
    assert shown(-math.inf) == [None, 96]


SHARED = textwrap.dedent("""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector
    from sterna.frontend.metrics import allocated_files
    allocated_files.allocate_metrics()
    from sterna.frontend.metrics.prometheus import FrontendMetrics
    from sterna.messages.actors import ClusterStats, InstanceStats

    metrics = FrontendMetrics(CollectorRegistry())

    def show(names, emptied=()):
        freeness = {name: float("-inf" if name in emptied else 45.5) for name in names}
        metrics.show(
            ClusterStats(
                tuple(InstanceStats(each, 2, 1, 96, 1000, freeness[each], 1, 0) for each in names)
            )
        )

    def shown(name, gauge="used_tokens"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return registry.get_sample_value(f"sterna_instance_{gauge}", {"instance": name})
""")
"""Several front ends answer for each other through files."""


def test_where_processes_share_their_metrics_an_instance_that_is_gone_disappears(tmp_path: Path):
    script = SHARED + textwrap.dedent("""
        show(["i0", "i1"])
        show(["i1"])
        print(shown("i0"), shown("i1"))
        show(["i1", "i0"])
        print(shown("i0"), shown("i1"))
    """)
    assert printed(script, tmp_path) == ["None", "96.0", "96.0", "96.0"]


def test_where_processes_share_their_metrics_one_that_is_emptied_has_no_freeness(tmp_path: Path):
    script = SHARED + textwrap.dedent("""
        show(["i0", "i1"])
        show(["i0", "i1"], emptied=["i0"])
        print(shown("i0", "freeness_steps"), shown("i1", "freeness_steps"), shown("i0"))
    """)
    assert printed(script, tmp_path) == ["None", "45.5", "96.0"]


def test_among_many_instances_the_files_are_written_anew_for_several_that_are_gone(tmp_path: Path):
    """A front end would stand still for each one otherwise."""
    script = SHARED + textwrap.dedent("""
        names = [f"i{number}" for number in range(40)]
        show(names)
        show(names[1:])
        print(shown("i0"), shown("i39"))
        show(names[2:])
        print(shown("i0"), shown("i39"))
        show(names[3:])
        print(shown("i0"), shown("i1"), shown("i2"), shown("i39"))
    """)
    told = printed(script, tmp_path)
    assert told == ["nan", "96.0", "nan", "96.0", "None", "None", "None", "96.0"]


def test_the_files_do_not_grow_with_instances_that_come_and_go(tmp_path: Path):
    script = SHARED + textwrap.dedent("""
        import os
        for number in range(400):
            show([f"i{number}", f"i{number + 1}"])
        folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
        print(sum(os.path.getsize(os.path.join(folder, each)) for each in os.listdir(folder)) >> 16)
        print(shown("i398"), shown("i400"))
    """)
    num_units, *values = printed(script, tmp_path)
    # Each kind of series has 64 KiB.
    assert int(num_units) <= 4
    assert values == ["None", "96.0"]


def printed(script: str, metrics_folder: Path) -> list[str]:
    """What a process prints that shares its metrics."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics_folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.split()


def test_gauges_of_a_process_that_has_ended_are_shown_no_more_its_counts_are(tmp_path: Path):
    """An instance may have gone, and the last request of a class have ended, before a successor
    shows its first gauges."""
    first = textwrap.dedent("""
        import os
        from prometheus_client import CollectorRegistry
        from sterna.frontend.metrics.prometheus import FrontendMetrics
        from sterna.messages.actors import ClusterStats, InstanceStats

        metrics = FrontendMetrics(CollectorRegistry())
        i0 = InstanceStats(
            "i0", 2, 1, 96, 1000, 45.5, 1, 0, num_by_priority=((1, 5),), usage_by_priority=((1, 9),)
        )
        metrics.show(ClusterStats((i0,)))
        metrics.count_sent_again(3)
        print(os.getpid())
    """)
    successor = textwrap.dedent("""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector
        from sterna.frontend.metrics.prometheus import FrontendMetrics
        from sterna.messages.actors import ClusterStats, InstanceStats

        i1 = InstanceStats("i1", 2, 1, 64, 1000, 45.5, 1, 0)
        FrontendMetrics(CollectorRegistry()).show(ClusterStats((i1,)))
        shown = CollectorRegistry()
        MultiProcessCollector(shown)
        for name in ("i0", "i1"):
            print(shown.get_sample_value("sterna_instance_used_tokens", {"instance": name}))
        print(shown.get_sample_value("sterna_running_requests", {"execution_priority": "1"}))
        print(shown.get_sample_value("sterna_requests_sent_again_total"))
    """)
    (process_id,) = printed(first, tmp_path)
    mark_process_dead(int(process_id), str(tmp_path))
    assert printed(successor, tmp_path) == ["None", "64.0", "None", "3.0"]


def test_migrations_are_counted_by_outcome_and_timed_where_the_request_moved():
    registry = CollectorRegistry()
    FrontendMetrics(registry).count_migrations(
        [
            MigrationEnd("committed", 2, 0.012, "memory"),
            MigrationEnd("committed", 3, 0.03, "operator"),
            MigrationEnd("no_memory", 1, 0.0, "memory"),
        ]
    )

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sterna_{name}", labels)

    assert shown("migrations_total", outcome="committed", cause="memory") == 1
    assert shown("migrations_total", outcome="committed", cause="operator") == 1
    assert shown("migrations_total", outcome="no_memory", cause="memory") == 1
    assert shown("migration_downtime_seconds_count") == 2
    assert shown("migration_downtime_seconds_bucket", le="0.015") == 1
    assert shown("migration_stages_sum") == 5


def test_what_auto_scaling_decides_is_counted():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    metrics.count_scaling(2, 0)
    metrics.count_scaling(1, 1)

    def shown(direction: str) -> float | None:
        return registry.get_sample_value("sterna_scaling_decisions_total", {"direction": direction})

    assert (shown("up"), shown("down")) == (3, 1)


def test_free_memory_in_pieces_is_shown_as_fragmentation():
    """i0 has 300 tokens for a head of 400, and i1 has 200: in one piece it would fit."""

    def waiting(instance_id: str, used_tokens: int, head_demand_tokens: int) -> InstanceStats:
        return structs.replace(
            stats_of(instance_id, used_tokens), head_demand_tokens=head_demand_tokens
        )

    def shown(*instances: InstanceStats) -> float | None:
        registry = CollectorRegistry()
        FrontendMetrics(registry).show(ClusterStats(instances))
        return registry.get_sample_value("sterna_fragmentation_ratio")

    assert shown(waiting("i0", 700, 400), waiting("i1", 800, 0)) == 400 / 2000
    assert shown(waiting("i0", 700, 400), waiting("i1", 950, 0)) == 0, "there is not as much"
    assert shown(waiting("i0", 500, 400), waiting("i1", 800, 0)) == 0, "it fits where it is"
    assert shown() == 0


def test_requests_and_memory_are_shown_by_execution_priority_also_when_none_is_left():
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)

    def shown() -> list[float | None]:
        return [
            registry.get_sample_value(name, {"execution_priority": each})
            for name in ("sterna_running_requests", "sterna_used_tokens")
            for each in ("0", "1")
        ]

    normal, high = Priority(0), Priority(1)
    both = (
        structs.replace(
            stats_of("i0", 96),
            num_by_priority=((normal, 2), (high, 1)),
            usage_by_priority=((normal, 64), (high, 32)),
        ),
        structs.replace(
            stats_of("i1", 96), num_by_priority=((high, 3),), usage_by_priority=((high, 96),)
        ),
    )
    metrics.show(ClusterStats(both))
    assert shown() == [2, 4, 64, 128]
    metrics.show(ClusterStats((stats_of("i0", 96),)))
    assert shown() == [0, 0, 0, 0]


def looked_up(instance_id: str, num_tokens: int, num_hits: int) -> InstanceStats:
    return InstanceStats(
        *(InstanceId(instance_id), 0, 0, 0, 1000, 0.0, 0, 0),
        num_prefix_tokens=num_tokens,
        num_prefix_hits=num_hits,
        external_counts=(num_tokens // 10, num_hits // 10),
    )


def test_counters_of_caches_grow_by_what_each_instance_has_counted_since():
    counts = EngineCounts()
    assert counts.take([]) == EngineGrowth()
    # A predecessor of this front end may have counted these.
    assert counts.take([looked_up("i0", 100, 40)]) == EngineGrowth()
    assert counts.take([looked_up("i0", 100, 40), looked_up("i1", 30, 16)]) == EngineGrowth(
        (30, 16), (3, 1)
    )
    assert counts.take([looked_up("i0", 120, 50), looked_up("i1", 30, 16)]) == EngineGrowth(
        (20, 10), (2, 1)
    )


def test_an_instance_that_a_new_scheduler_does_not_know_yet_is_not_counted_twice():
    counts = EngineCounts()
    counts.take([looked_up("i0", 100, 90)])
    assert counts.take([]) == EngineGrowth()
    assert counts.take([looked_up("i0", 105, 92)]) == EngineGrowth((5, 2))


def test_sums_of_a_new_engine_count_from_its_start():
    counts = EngineCounts()
    counts.take([looked_up("i0", 100, 90)])
    assert counts.take([looked_up("i0", 64, 32)]) == EngineGrowth((64, 32), (6, 3))


def test_drafts_are_counted_by_their_positions():
    """A new engine may have longer drafts."""
    counts = EngineCounts()
    report = structs.replace(looked_up("i0", 0, 0), draft_counts=(10, 20, 8, 3))
    assert counts.take([report]) == EngineGrowth(draft_counts=(0, 0, 0, 0))
    report = structs.replace(report, draft_counts=(12, 24, 9, 3))
    assert counts.take([report]) == EngineGrowth(draft_counts=(2, 4, 1, 0))
    report = structs.replace(report, draft_counts=(5, 15, 4, 2, 1))
    assert counts.take([report]) == EngineGrowth(draft_counts=(5, 15, 4, 2, 1))


def test_sums_of_an_instance_that_is_gone_are_forgotten():
    counts = EngineCounts()
    counts.take([looked_up("i0", 100, 90), looked_up("i1", 10, 0)])
    counts.keep_only([InstanceId("i1")])
    assert counts.take([looked_up("i1", 12, 1)]) == EngineGrowth((2, 1))
    assert list(counts._counts) == ["i1"]
