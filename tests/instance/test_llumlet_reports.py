"""Load reports of a llumlet: their content, and how often they are sent (Section 4.3)."""

import math
from dataclasses import replace

import pytest

from sterna.instance.llumlet import Llumlet
from sterna.migration.messages import Reserve
from sterna.types import HIGH, InstanceView, MigrationId, RequestId
from tests.instance.llumlets import A, B, C, committed, config, queuing, reports, running, view


def test_the_first_view_is_reported_at_once() -> None:
    (report,) = reports(Llumlet(A, config()).on_view(view(running("r", 64)), 5.0))
    assert report.load.instance_id == A
    assert report.load.used_tokens == 64
    assert report.load.num_running == 1


def test_loads_are_reported_at_most_once_an_interval_while_they_change() -> None:
    """Section 4.3: "The loads are reported by the llumlets periodically"."""
    llumlet = Llumlet(A, config(report_interval_s=0.25))
    times = [step / 16 for step in range(17)]
    reported = [
        now_s
        for step, now_s in enumerate(times)
        if reports(llumlet.on_view(view(running("r", 64 + step)), now_s))
    ]
    assert reported == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_thousand_instances_report_less_often_but_what_is_urgent_at_once() -> None:
    """By hand: 1,024 are eight times as many as report at the full rate."""
    llumlet = Llumlet(A, config(report_interval_s=0.05))
    for num_instances, interval_s in ((128, 0.05), (1_024, 0.4)):
        llumlet.set_num_instances(num_instances)
        begun_s = 10.0 * num_instances
        llumlet.on_view(view(running("r", num_instances)), begun_s)
        assert reports(llumlet.on_view(view(running("r", 64)), begun_s + 0.01)) == []
        assert llumlet.next_deadline_s == begun_s + interval_s
        assert len(reports(llumlet.on_view(view(queuing("q", 96)), begun_s + 0.02))) == 1
        assert len(reports(llumlet.on_view(view(running("r", 64)), begun_s + 0.03))) == 1


def test_a_change_just_after_a_report_is_told_when_the_interval_is_over() -> None:
    llumlet = Llumlet(A, config(report_interval_s=0.05))
    llumlet.on_view(view(running("r", 64)), 0.0)
    assert reports(llumlet.on_view(view(running("r", 80)), 0.01)) == []
    assert llumlet.next_deadline_s == 0.05
    (report,) = reports(llumlet.on_tick(0.05))
    assert report.load.used_tokens == 80


def test_a_tick_without_a_change_does_not_delay_the_report_of_the_next_one() -> None:
    llumlet = Llumlet(A, config(report_interval_s=0.05))
    llumlet.on_view(view(running("r", 64)), 0.0)
    assert reports(llumlet.on_tick(0.06)) == []
    (report,) = reports(llumlet.on_view(view(running("r", 80)), 0.07))
    assert report.load.used_tokens == 80


def test_an_unchanged_load_is_reported_once_a_heartbeat() -> None:
    llumlet = Llumlet(A, config(report_interval_s=0.05, heartbeat_interval_s=1.0))
    llumlet.on_view(view(running("r", 64)), 0.0)
    for step in range(1, 20):
        assert reports(llumlet.on_view(view(running("r", 64)), 0.05 * step)) == []
    assert len(reports(llumlet.on_view(view(running("r", 64)), 1.0))) == 1
    assert llumlet.next_deadline_s == 2.0


def test_a_change_of_the_queue_is_reported_at_once() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    (report,) = reports(llumlet.on_view(view(running("r"), queuing("q", 96)), 0.001))
    assert report.load.num_queuing == 1
    assert report.load.head_demand_tokens == 96
    assert len(reports(llumlet.on_view(view(running("r")), 0.002))) == 1


@pytest.mark.parametrize("binds_late", [False, True])
def test_what_the_end_of_a_request_frees_is_reported_at_once(binds_late: bool) -> None:
    """Under every policy: the next request may need it."""
    policy = replace(config().policy, binds_late=binds_late)
    llumlet = Llumlet(A, replace(config(), policy=policy))
    llumlet.on_view(view(running("r"), running("s")), 0.0)
    (report,) = reports(llumlet.on_view(view(running("r")), 0.001))
    assert report.load.num_running == 1


def test_migrations_that_begin_and_end_are_reported_at_once() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    (report,) = reports(llumlet.on_destination(B, 0.001))
    assert report.load.num_migrating_out == 1
    (report,) = reports(committed(llumlet, "A-1", 0.002))
    assert report.load.num_migrating_out == 0


def test_a_migration_that_comes_is_reported_at_once() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(), 0.0)
    reserve = Reserve(MigrationId("C-1"), RequestId("r"), 0, 0, 1, True, None, b"request")
    (report,) = reports(llumlet.on_message(C, reserve, 0.001))
    assert report.load.num_migrating_in == 1


def test_reports_are_numbered() -> None:
    llumlet = Llumlet(A, config())
    numbers = [
        report.load.sequence
        for step in range(4)
        for report in reports(llumlet.on_view(view(running("r", 64 + step)), 0.1 * step))
    ]
    assert numbers == [1, 2, 3, 4]


def test_the_last_dispatch_that_was_admitted_is_reported() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_request_admitted(2)
    llumlet.on_request_admitted(1)
    (report,) = reports(llumlet.on_view(view(running("first"), running("second")), 0.0))
    assert report.load.last_dispatch == 2


def test_a_dispatch_that_ended_at_once_is_reported_without_a_step_of_the_engine() -> None:
    """It was refused, say. The scheduler counts it as in flight until then."""
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.on_request_admitted(5)
    assert llumlet.next_deadline_s == 0.05
    (report,) = reports(llumlet.on_tick(0.05))
    assert report.load.last_dispatch == 5


def test_a_terminating_instance_reports_that_it_is_one() -> None:
    """Algorithm 1, line 12: the fake request makes it a source of migrations."""
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.set_terminating(True, 0.0)
    assert llumlet.next_deadline_s == 0.05
    (report,) = reports(llumlet.on_tick(0.0))
    assert report.load.is_terminating
    (report,) = reports(llumlet.on_view(view(running("r", 80)), 0.1))
    assert report.load.is_terminating
    llumlet.set_terminating(False, 0.0)
    (report,) = reports(llumlet.on_tick(0.1))
    assert not report.load.is_terminating


def test_a_terminating_instance_is_to_say_so_as_soon_as_a_report_may_go_out() -> None:
    llumlet = Llumlet(A, config(report_interval_s=0.05, heartbeat_interval_s=1.0))
    llumlet.on_view(view(running("r")), 0.0)
    assert llumlet.next_deadline_s == 1.0
    llumlet.set_terminating(True, 0.01)
    assert llumlet.next_deadline_s == 0.05


def test_another_scheduler_is_told_the_load_at_once() -> None:
    llumlet = Llumlet(A, config(heartbeat_interval_s=1.0))
    llumlet.on_view(view(running("r")), 0.0)
    assert reports(llumlet.on_tick(0.5)) == []
    (report,) = reports(llumlet.on_scheduler(0.5))
    assert report.load.num_running == 1


def test_the_engines_own_word_that_it_terminates_is_believed() -> None:
    llumlet = Llumlet(A, config())
    terminating = InstanceView(A, 4096, 16, is_terminating=True)
    (report,) = reports(llumlet.on_view(terminating, 0.0))
    assert report.load.is_terminating


def test_loads_are_finite_numbers() -> None:
    """Mistake 10: infinities in averages. The terminating flag says what infinity would."""
    llumlet = Llumlet(A, config())
    llumlet.set_terminating(True, 0.0)
    (report,) = reports(llumlet.on_view(view(running("r", 64, HIGH)), 0.0))
    assert math.isfinite(report.load.free_tokens)


def test_where_nothing_was_dispatched_the_report_says_so() -> None:
    (report,) = reports(Llumlet(A, config()).on_view(view(), 0.0))
    assert report.load.last_dispatch == 0


def test_another_scheduler_is_told_at_once_what_has_not_changed() -> None:
    """It knows nothing of this instance, and names a destination anew."""
    llumlet = Llumlet(A, config(heartbeat_interval_s=60.0))
    llumlet.on_view(view(), 0.0)
    llumlet.on_destination(B, 0.0)
    (report,) = reports(llumlet.on_scheduler(0.01))
    assert report.load.sequence == 2
    assert llumlet.destination is None
    assert llumlet.next_deadline_s == 60.01


def test_that_an_instance_has_overstayed_is_reported_without_a_step_of_the_engine() -> None:
    llumlet = Llumlet(A, replace(config(heartbeat_interval_s=600.0), drain_limit_s=60.0))
    llumlet.set_terminating(True, 0.0)
    llumlet.on_view(view(running("r", 64)), 0.0)
    assert llumlet.next_deadline_s == 60.0
    (report,) = reports(llumlet.on_tick(60.0))
    assert report.load.move_tokens == 0
    assert llumlet.next_deadline_s == 660.0


def test_what_changes_after_an_instance_has_overstayed_is_reported_after_the_interval() -> None:
    llumlet = Llumlet(A, replace(config(heartbeat_interval_s=600.0), drain_limit_s=60.0))
    llumlet.set_terminating(True, 0.0)
    llumlet.on_view(view(running("r", 64)), 0.0)
    llumlet.on_tick(60.0)
    assert reports(llumlet.on_view(view(running("r", 80)), 60.01)) == []
    assert reports(llumlet.on_tick(60.02)) == []
    assert llumlet.next_deadline_s == 60.05
    (report,) = reports(llumlet.on_tick(60.05))
    assert report.load.used_tokens == 80


def test_without_an_interval_nothing_is_reported_and_no_tick_is_asked_for() -> None:
    """In the simulator, which looks at loads itself."""
    llumlet = Llumlet(A, replace(config(), report_interval_s=None))
    assert llumlet.on_view(view(running("r")), 0.0) == []
    assert llumlet.next_deadline_s is None
    assert llumlet.on_tick(10.0) == []
    idle = Llumlet(A, replace(config(), report_interval_s=None))
    idle.on_view(view(), 0.0)
    assert idle.on_destination(B, 0.0) == []
    assert idle.next_deadline_s is None


def test_nothing_is_reported_before_the_first_view() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.on_tick(10.0) == []
    assert llumlet.next_deadline_s is None
