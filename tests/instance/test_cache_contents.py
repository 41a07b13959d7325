"""Whatever happens to reports, a scheduler that has got the last one knows what is cached."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.config import LlumletConfig
from sterna.engine.cache_changes import CacheChanges, CacheRecorder
from sterna.instance.cache_contents import CacheContents
from sterna.instance.core import InstanceCore, InstanceEffect
from sterna.messages.actors import CacheReport, InstanceMember, LoadReport, Membership
from sterna.messaging.send_effects import ToMailbox
from sterna.policy.presets import STERNA
from sterna.scheduler.prefix_index import PrefixIndex
from sterna.types import CacheGroup, CacheLayout, InstanceId, unpacked
from tests.instance.llumlets import view

I0 = InstanceId("i0")
LAYOUT = CacheLayout(4, 4, (CacheGroup(0, 4),))


def added(*keys: int) -> CacheChanges:
    return CacheChanges(keys, ())


# --------------------------------------------------------------------------------- the recorder


def test_changes_are_told_once_and_by_their_outcome() -> None:
    recorder = CacheRecorder()
    assert recorder.take() is None
    recorder.add(1)
    recorder.add(2)
    recorder.remove(2)
    recorder.remove(3)
    recorder.add(3)
    assert recorder.take() == CacheChanges((1, 3), (2,))
    assert recorder.take() is None


def test_a_cache_that_was_emptied_has_what_came_afterwards() -> None:
    recorder = CacheRecorder()
    recorder.add(1)
    recorder.clear()
    recorder.add(2)
    assert recorder.take() == CacheChanges((2,), (), is_whole=True)
    recorder.clear()
    assert recorder.take() == CacheChanges((), (), is_whole=True)


# ------------------------------------------------------------------------------------- reports


def test_the_first_report_has_everything_and_the_next_ones_the_changes() -> None:
    contents = CacheContents(I0, LAYOUT)
    contents.on_changes(added(1))
    first = contents.next_report()
    assert first is not None
    assert (first.layout, len(first.added)) == (LAYOUT, 8)
    assert contents.next_report() is None
    contents.on_changes(CacheChanges((2,), (1,)))
    second = contents.next_report()
    assert second is not None
    assert (second.layout, len(second.added), len(second.removed)) == (None, 8, 8)


def test_an_empty_cache_is_reported_too() -> None:
    """So that the scheduler knows what it is when the first prompt is on its way there."""
    assert CacheContents(I0, LAYOUT).next_report() == CacheReport(I0, b"", layout=LAYOUT)


def test_while_everything_is_owed_no_changes_are_kept() -> None:
    """A cluster may be without a scheduler for days, in which many blocks come and go."""
    contents = CacheContents(I0, LAYOUT)
    contents.on_changes(added(1, 2))
    contents.next_report()
    contents.on_changes(CacheChanges((3,), (1,)))
    contents.owe_all()
    for key in range(100, 10_100):
        contents.on_changes(added(key))
        contents.on_changes(CacheChanges((), (key,)))
    assert contents._unsent.take() is None
    report = contents.next_report()
    assert report is not None
    assert (report.layout, sorted(unpacked(report.added)), report.removed) == (LAYOUT, [2, 3], b"")
    assert contents.next_report() is None


COMMANDS = st.lists(
    st.one_of(
        st.builds(
            CacheChanges, st.tuples(st.integers(1, 5)), st.tuples(st.integers(6, 9)), st.booleans()
        ),
        st.builds(
            CacheChanges, st.tuples(st.integers(6, 9)), st.tuples(st.integers(1, 5)), st.just(False)
        ),
        st.sampled_from(["report", "report", "lost", "other scheduler"]),
    ),
    max_size=20,
)


@given(COMMANDS)
def test_the_scheduler_has_what_the_cache_has(commands: list[CacheChanges | str]) -> None:
    contents, index = CacheContents(I0, LAYOUT), PrefixIndex()
    keys: set[int] = set()
    for command in [*commands, "report"]:
        if isinstance(command, CacheChanges):
            removed = () if command.is_whole else command.removed
            command = CacheChanges(command.added, removed, command.is_whole)
            keys = (set() if command.is_whole else keys - set(removed)) | set(command.added)
            contents.on_changes(command)
        elif command == "other scheduler":
            index = PrefixIndex()
            contents.owe_all()
        elif (report := contents.next_report()) is not None:
            if command == "report":
                index.on_report(report)
            else:
                contents.owe_all()
        assert contents.keys == keys
    assert index.contents() == {I0: keys}


# ---------------------------------------------------------------------------- with load reports


def membership(version: int, scheduler: str) -> Membership:
    return Membership(version, (InstanceMember(I0, "mailbox of i0"),), (), scheduler)


def to_scheduler(effects: list[InstanceEffect]) -> list[CacheReport | LoadReport]:
    messages = [each.message for each in effects if isinstance(each, ToMailbox)]
    return [each for each in messages if isinstance(each, CacheReport | LoadReport)]


def reporting(core: InstanceCore, now_s: float) -> list[CacheReport | LoadReport]:
    return to_scheduler(core.on_view(view(), now_s))


def test_changes_go_before_the_load_that_they_belong_to() -> None:
    core = InstanceCore(I0, LlumletConfig(policy=STERNA))
    core.report_cache(LAYOUT)
    core.on_message(membership(1, "scheduler"), (), 0.0)
    core.on_cache(added(1))
    first, load = reporting(core, 1.0)
    assert isinstance(first, CacheReport)
    assert isinstance(load, LoadReport)
    assert first.layout == LAYOUT
    core.on_cache(added(2))
    changes, _ = reporting(core, 2.0)
    assert isinstance(changes, CacheReport)
    assert changes.layout is None
    assert [type(each) for each in reporting(core, 3.0)] == [LoadReport]


def test_another_scheduler_gets_everything() -> None:
    core = InstanceCore(I0, LlumletConfig(policy=STERNA))
    core.report_cache(LAYOUT)
    core.on_message(membership(1, "scheduler"), (), 0.0)
    core.on_cache(added(1, 2))
    reporting(core, 1.0)
    report, _ = to_scheduler(core.on_message(membership(2, "successor"), (), 1.5))
    assert isinstance(report, CacheReport)
    assert (report.layout, len(report.added)) == (LAYOUT, 2 * 8)


def test_after_a_report_that_was_not_sent_the_next_one_has_everything() -> None:
    core = InstanceCore(I0, LlumletConfig(policy=STERNA))
    core.report_cache(LAYOUT)
    core.on_message(membership(1, "scheduler"), (), 0.0)
    core.on_cache(added(1))
    reporting(core, 1.0)
    core.on_cache(added(2))
    unsent, _ = reporting(core, 2.0)
    core.on_unsent("scheduler", unsent)
    report, _ = reporting(core, 3.0)
    assert isinstance(report, CacheReport)
    assert (report.layout, len(report.added)) == (LAYOUT, 2 * 8)


def test_an_instance_that_is_not_to_report_its_cache_sends_loads_alone() -> None:
    core = InstanceCore(I0, LlumletConfig(policy=STERNA))
    core.on_message(membership(1, "scheduler"), (), 0.0)
    core.on_cache(added(1))
    assert [type(each) for each in reporting(core, 1.0)] == [LoadReport]
