"""The driver while Ray's GCS is away."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sterna.runtime import driver
from sterna.runtime.driver import Driver


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
    now_s = 100.0
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(driver, "is_gcs_up", lambda: is_up)
    driving = DriverWithoutGcs(None, None)  # type: ignore[arg-type]
    for _ in range(3):
        driving._keep_reserve()
        # It does not ask all the time.
        driving._keep_reserve()
        now_s += driver.RESERVE_DELAY_S
    assert driving.num_refused == (3 if is_up else 0)
    assert driving._reserve is None
