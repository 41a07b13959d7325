"""Sterna's metrics of the instances."""

from prometheus_client import CollectorRegistry

from sterna.frontend.gauges import InstanceGauges
from sterna.messages import ClusterStats, InstanceStats
from sterna.types import InstanceId


def stats_of(instance_id: str, used_tokens: int) -> InstanceStats:
    return InstanceStats(InstanceId(instance_id), 2, 1, used_tokens, 1000, 45.5, 1, 0)


def test_every_instance_has_its_own_series_and_the_last_report_holds():
    registry = CollectorRegistry()
    gauges = InstanceGauges(registry)

    gauges.show(ClusterStats((stats_of("i0", 96), stats_of("i1", 64))))
    gauges.show(ClusterStats((stats_of("i0", 128), stats_of("i1", 64))))

    assert registry.get_sample_value("sterna_instance_used_tokens", {"instance": "i0"}) == 128
    assert registry.get_sample_value("sterna_instance_used_tokens", {"instance": "i1"}) == 64
    assert registry.get_sample_value("sterna_instance_freeness_steps", {"instance": "i1"}) == 45.5


def test_an_instance_that_is_gone_disappears():
    registry = CollectorRegistry()
    gauges = InstanceGauges(registry)

    gauges.show(ClusterStats((stats_of("i0", 96), stats_of("i1", 64))))
    gauges.show(ClusterStats((stats_of("i1", 64),)))

    assert registry.get_sample_value("sterna_instance_used_tokens", {"instance": "i0"}) is None
