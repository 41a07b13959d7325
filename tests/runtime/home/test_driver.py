"""The driver while Ray's GCS is away, its supervisors' successors, and its ways with Ray."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sterna.errors import SternaError
from sterna.runtime.home import driver
from sterna.runtime.home.driver import Driver, SupervisorDiedError
from sterna.runtime.home.driver_messages import REPORTED_STATUS, Changed, UseRay

USE_RAY = UseRay("127.0.0.1:1", {}, "", is_resumed=True)


class DriverWithoutGcs(Driver):
    """A driver that cannot start a supervisor: Ray's GCS dies while it is asked."""

    num_refused = 0

    def _begin(self, *, is_successor: bool, is_reserve: bool = False) -> Any:
        assert is_successor
        assert is_reserve
        self.num_refused += 1
        raise ray.exceptions.GetTimeoutError("the GCS server is dead")


@pytest.mark.parametrize("is_up", [False, True])
def test_a_driver_without_a_supervisor_in_reserve_goes_on(
    monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    """Its end would be that of the server, which lacks nothing yet."""
    monkeypatch.setattr(driver, "is_gcs_up", lambda: is_up)
    driving = DriverWithoutGcs(None, None)  # type: ignore[arg-type]
    for num_passed in range(3):
        now_s = 100.0 + num_passed * driver.RESERVE_DELAY_S
        driving._keep_reserve(now_s)
        # It does not ask all the time.
        driving._keep_reserve(now_s)
    assert driving.num_refused == (3 if is_up else 0)
    assert driving._reserve is None


class Successor:
    """The handle of a supervisor, whose takeover is ready at once.

    Args:
        is_lost: whether it dies while it takes over.
    """

    def __init__(self, *, is_lost: bool = False) -> None:
        self._is_lost = is_lost
        self.has_ended = False
        self.actor = SimpleNamespace(take_over=SimpleNamespace(remote=lambda *_: self.outcome))

    def outcome(self) -> None:
        if self._is_lost:
            raise ray.exceptions.ActorDiedError

    def why_halted(self) -> str | None:
        return None

    def end(self) -> None:
        self.has_ended = True


class DriverWith(Driver):
    """A driver that begins these supervisors, one after the other."""

    def __init__(self, *begun: Successor) -> None:
        self.news: list[Changed] = []
        super().__init__(
            SimpleNamespace(is_urgent=False),  # type: ignore[arg-type]
            SimpleNamespace(send=self.news.append),  # type: ignore[arg-type]
        )
        self._serve = SimpleNamespace(config=None, args=None, emulated=None)  # type: ignore[assignment]
        self._to_begin = list(begun)

    def _begin(self, *, is_successor: bool, is_reserve: bool = False) -> Any:
        assert is_successor
        assert not is_reserve
        return self._to_begin.pop(0)


Find = Callable[[Successor | None, Successor | None], None]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Find:
    """Sets which supervisors another driver has left: the acting one, and the one in reserve."""

    def find(acting: Successor | None, reserve: Successor | None) -> None:
        monkeypatch.setattr(driver, "find_supervisors", lambda _: (acting, reserve))

    monkeypatch.setattr(driver.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(driver.ray, "get", lambda call: call())
    return find


def test_another_driver_goes_on_with_the_supervisors_that_are_there(find: Find) -> None:
    acting, reserve = Successor(), Successor()
    find(acting, reserve)
    driving = DriverWith()
    driving._find()
    assert (driving._supervisor, driving._reserve) == (acting, reserve)
    assert driving.news == []


def test_without_an_acting_supervisor_the_one_in_reserve_takes_over(find: Find) -> None:
    reserve = Successor()
    find(None, reserve)
    driving = DriverWith()
    driving._find()
    assert (driving._supervisor, driving._reserve) == (reserve, None)
    assert driving.news == [Changed(is_ready=False)]


def test_a_supervisor_in_reserve_that_dies_as_it_takes_over_has_a_successor(find: Find) -> None:
    lost, other = Successor(is_lost=True), Successor()
    find(None, lost)
    driving = DriverWith(other)
    driving._find()
    assert lost.has_ended
    assert driving._supervisor is other
    assert driving.news == [Changed(is_ready=False)]


def test_a_successor_that_was_begun_anew_and_dies_ends_the_server(find: Find) -> None:
    """Whatever it died of, the next one would die of as well."""
    find(None, None)
    driving = DriverWith(Successor(is_lost=True), Successor())
    with pytest.raises(SupervisorDiedError, match=r"^the supervisor died, and the server with it"):
        driving._find()
    assert driving.news == []


class FewOrders:
    """One that is to connect to Ray, and then to end."""

    def __init__(self) -> None:
        self._orders = [USE_RAY, None]

    def next(self) -> UseRay | None:
        return self._orders.pop(0)


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The addresses of the Rays that the driver has connected to, as Ray does it."""
    addresses: list[str] = []
    before = signal.getsignal(signal.SIGTERM)

    def init(address: str, **_: Any) -> None:
        # Workers may import from where the driver works.
        os.getcwd()
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        addresses.append(address)

    worker = SimpleNamespace(global_worker=SimpleNamespace())
    monkeypatch.setattr(driver.ray, "init", init)
    monkeypatch.setattr(driver.ray._private, "worker", worker)
    yield addresses
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_driver_as_any_death_does(connects: list[str]) -> None:
    """It is replaced then: that is not how it is told to end."""
    assert Driver(FewOrders(), None).run() == 0  # type: ignore[arg-type]
    assert connects == [USE_RAY.address]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def logs() -> Iterator[None]:
    """A driver's process begins without handlers, and what it does with its log lines ends with the
    test.

    pytest adds a handler of its own to each logger that does not propagate when the test begins.
    """
    ours = logging.getLogger("sterna")
    before = ours.level, ours.propagate, [*ours.handlers]
    ours.handlers.clear()
    ours.propagate = True
    yield
    ours.setLevel(before[0])
    ours.propagate, ours.handlers[:] = before[1:]


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SternaError("no room"), REPORTED_STATUS, "sterna: error: no room"),
        (OSError("no room"), 1, "OSError: no room"),
    ],
)
def test_a_driver_says_by_its_status_whether_it_has_told_why_the_server_ends(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    said: str,
) -> None:
    """Whatever else it ends with, another one goes on."""

    class Fails(FewOrders):
        def next(self) -> UseRay | None:
            raise error

    ends = os.pipe()
    monkeypatch.setattr(driver, "Orders", lambda _: Fails())
    monkeypatch.setattr(sys, "argv", ["driver", *map(str, ends)])
    assert driver.main() == status
    assert said in capfd.readouterr().err


def test_a_driver_connects_although_its_folder_has_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connects: list[str]
) -> None:
    """As a dead one's successor, which is started where `sterna serve` was."""
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert Driver(FewOrders(), None).run() == 0  # type: ignore[arg-type]
    assert connects == [USE_RAY.address]
