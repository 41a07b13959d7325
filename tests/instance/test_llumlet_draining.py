"""How a llumlet empties its instance: live, and from the tokens where that takes too long or where
the KV cache is of no use."""

from dataclasses import replace

from sterna.instance.llumlet import Llumlet
from sterna.migration.messages import Mode, Reason, Reserve, Send
from sterna.policy.own import Policy
from sterna.types import Immovable, InstanceView, MigrationId, RequestId, RequestView
from tests.instance.llumlets import PROGRESS, A, B, C, config, inspects, reports, running, view


def emptied(*names: str, drain_limit_s: float | None = 60.0) -> Llumlet:
    """Instance A with these requests, which is being emptied since 0 s."""
    llumlet = Llumlet(A, replace(config(), drain_limit_s=drain_limit_s))
    llumlet.on_view(view(*map(running, names)), 0.0)
    llumlet.set_terminating(True, 0.0)
    return llumlet


def num_blocks_asked(llumlet: Llumlet, migration_id: str, now_s: float) -> int:
    """What the first stage of the migration asks of its destination."""
    effects = llumlet.on_outcome(MigrationId(migration_id), PROGRESS, now_s)
    (reserve,) = [
        each.message
        for each in effects
        if isinstance(each, Send) and isinstance(each.message, Reserve)
    ]
    return reserve.num_blocks


def test_an_instance_that_is_emptied_moves_its_requests_with_their_kv_cache() -> None:
    llumlet = emptied("r")
    assert inspects(llumlet.on_destination(B, 1.0)) == ["r"]
    assert num_blocks_asked(llumlet, "A-1", 1.0) > 0


def test_what_is_left_after_the_limit_moves_without_it() -> None:
    llumlet = emptied("r")
    assert llumlet.next_deadline_s is not None
    assert llumlet.next_deadline_s <= 60.0
    llumlet.on_tick(60.0)
    assert inspects(llumlet.on_destination(B, 60.0)) == ["r"]
    assert num_blocks_asked(llumlet, "A-1", 60.0) == 0


def test_the_end_of_the_limit_is_a_deadline_until_it_has_come() -> None:
    llumlet = Llumlet(A, replace(config(), drain_limit_s=60.0, report_interval_s=None))
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.set_terminating(True, 2.0)
    assert llumlet.next_deadline_s == 62.0
    llumlet.on_tick(61.9)
    assert not llumlet.has_overstayed
    llumlet.on_tick(62.0)
    assert llumlet.has_overstayed
    assert llumlet.next_deadline_s is None
    llumlet.set_terminating(False, 63.0)
    assert not llumlet.has_overstayed
    llumlet.set_terminating(True, 64.0)
    assert llumlet.next_deadline_s == 124.0


def test_after_the_limit_the_scheduler_learns_that_no_memory_is_needed() -> None:
    llumlet = emptied("r")
    (report,) = reports(llumlet.on_tick(0.0))
    assert report.load.move_tokens == 64
    (report,) = reports(llumlet.on_tick(60.0))
    assert report.load.move_tokens == 0


def test_the_end_of_the_limit_is_reported_without_waiting_for_a_heartbeat() -> None:
    slow = config(report_interval_s=0.05, heartbeat_interval_s=1000.0)
    llumlet = Llumlet(A, replace(slow, drain_limit_s=60.0))
    llumlet.on_view(view(running("r", 64)), 0.0)
    llumlet.set_terminating(True, 0.0)
    assert len(reports(llumlet.on_tick(1.0))) == 1
    (report,) = reports(llumlet.on_tick(60.0))
    assert report.load.move_tokens == 0
    # What changes afterwards is reported as ever.
    (report,) = reports(llumlet.on_view(view(running("r", 80)), 61.0))
    assert report.load.used_tokens == 80
    assert reports(llumlet.on_view(view(running("r", 80)), 62.0)) == []


def test_after_the_limit_an_instance_with_nothing_to_move_says_so() -> None:
    """Else the scheduler would give it a destination that others need."""
    llumlet = Llumlet(A, replace(config(), drain_limit_s=60.0))
    llumlet.on_view(view(running("r", immovable=Immovable.PREFILLING)), 0.0)
    llumlet.set_terminating(True, 0.0)
    (report,) = reports(llumlet.on_tick(60.0))
    assert report.load.move_tokens is None


def test_an_instance_that_serves_again_moves_with_the_kv_cache_again() -> None:
    llumlet = emptied("r")
    llumlet.on_tick(60.0)
    llumlet.set_terminating(False, 61.0)
    assert inspects(llumlet.on_destination(B, 61.0)) == ["r"]
    assert num_blocks_asked(llumlet, "A-1", 61.0) > 0


def test_the_limit_counts_from_when_the_emptying_began() -> None:
    """Every membership says again that the instance is being emptied."""
    llumlet = emptied("r")
    llumlet.set_terminating(True, 50.0)
    llumlet.on_tick(60.0)
    llumlet.on_destination(B, 60.0)
    assert num_blocks_asked(llumlet, "A-1", 60.0) == 0


def test_without_a_limit_a_request_waits_for_memory_elsewhere() -> None:
    llumlet = emptied("r", drain_limit_s=None)
    llumlet.on_tick(1e6)
    llumlet.on_destination(B, 1e6)
    assert num_blocks_asked(llumlet, "A-1", 1e6) > 0


def test_requests_move_without_the_kv_cache_to_where_it_is_of_no_use() -> None:
    """During a rolling restart to other weights, say."""
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r"), running("s")), 0.0)
    llumlet.set_incompatible_instances([C])
    llumlet.on_destination(C, 0.0)
    assert num_blocks_asked(llumlet, "A-1", 0.0) == 0


def test_an_operators_order_to_a_stranger_is_carried_out_without_the_kv_cache() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.set_incompatible_instances([C])
    assert not isinstance(llumlet.on_order(RequestId("r"), C, Mode.LIVE, 0.0), Reason)
    assert num_blocks_asked(llumlet, "A-1", 0.0) == 0
    assert not isinstance(llumlet.on_order(RequestId("s"), B, Mode.LIVE, 0.0), Reason)
    assert num_blocks_asked(llumlet, "A-2", 0.0) > 0


class MovesNothing(Policy):
    """A custom class that lets every request end where it is."""

    def victims(self, instance: InstanceView) -> list[RequestView]:
        return []


def test_after_the_limit_a_custom_class_keeps_nothing_back() -> None:
    """It may leave requests out, and the end of the emptying was promised."""
    policy = MovesNothing().as_config()
    llumlet = Llumlet(A, replace(config(), policy=policy, drain_limit_s=60.0))
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.set_terminating(True, 0.0)
    (report,) = reports(llumlet.on_tick(0.0))
    assert report.load.move_tokens is None
    assert inspects(llumlet.on_destination(B, 1.0)) == []
    effects = llumlet.on_tick(60.0)
    (report,) = reports(effects)
    assert report.load.move_tokens == 0
    assert inspects(effects) == ["r"]
