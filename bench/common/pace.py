"""Speed of the machine: other tenants of the hardware slow it down, invisible to programs here."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Run = TypeVar("Run")

PROBE_S = 2.0

MAX_CHANGE = 0.2
"""Largest relative change of the machine's speed between runs that are compared."""

MAX_DRIFT = 0.35
"""Largest relative change of the speed since the first pair, for pairs to be comparable."""

MAX_ATTEMPTS = 3
"""To measure runs that are compared at one speed."""

RETRY_S = 30.0
WAIT_TIMEOUT_S = 900.0


def speed() -> float:
    """Measure the speed of all cores at an engine's work, in billions of multiplications a second.

    No other program should run meanwhile.
    """
    # The products of a prompt of 256 tokens with a matrix of the small model.
    tokens, weights = np.ones((256, 576), np.float32), np.ones((576, 1536), np.float32)
    begun_s = time.monotonic()
    num_products = 0
    while (elapsed_s := time.monotonic() - begun_s) < PROBE_S:
        tokens @ weights
        num_products += 1
    return num_products * tokens.size * weights.shape[1] / elapsed_s / 1e9


class Pace:
    """Compares the machine's speed with an earlier one.

    Args:
        first: the speed at the beginning of the measurement; by default it is measured now.
        say: called with messages for the user.
        is_held: whether all pairs must have about this speed; else only the runs of each pair
            must have the same.
        speed, wait: the functions that measure and wait.
    """

    def __init__(
        self,
        first: float | None,
        say: Callable[[str], None],
        *,
        is_held: bool = True,
        speed: Callable[[], float] = speed,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._say = say
        self._is_held = is_held
        self._speed = speed
        self._wait = wait
        self.first = self._latest = speed() if first is None else first

    def is_kept(self) -> bool:
        """Whether the speed is that of the end of `wait_until_kept`; reports it if it is not."""
        return self._is_near(self._speed(), self._latest, MAX_CHANGE, "before")

    def wait_until_kept(self) -> bool:
        """Wait until the speed is about that of the beginning; returns whether it is, since the
        wait has a limit."""
        for _ in range(round(WAIT_TIMEOUT_S / RETRY_S)):
            if self._is_as_at_first():
                return True
            self._wait(RETRY_S)
        return self._is_as_at_first()

    def _is_as_at_first(self) -> bool:
        self._latest = self._speed()
        if not self._is_held:
            return True
        return self._is_near(self._latest, self.first, MAX_DRIFT, "at first")

    def _is_near(self, now: float, then: float, max_change: float, when: str) -> bool:
        is_near = abs(now / then - 1.0) <= max_change
        if not is_near:
            self._say(f"the machine is {now / then:.2f} times as fast as {when}")
        return is_near


def at_one_speed(
    pace: Pace | None,
    sides: Sequence[str],
    run: Callable[[str, int], Run],
    say: Callable[[str], None],
) -> tuple[list[Run], bool]:
    """One run of each side, all again where the machine's speed changed, up to `MAX_ATTEMPTS`.

    Args:
        pace: None: the speed is not looked at.
        run: gets the side and the number of the attempt, from 1 on.

    Returns:
        The runs of the last attempt, and whether the machine kept its speed in it.
    """
    attempt = 1
    while True:
        is_steady = pace is None or pace.wait_until_kept()
        runs = []
        for side in sides:
            runs.append(run(side, attempt))
            is_steady = is_steady and (pace is None or pace.is_kept())
            if not is_steady and attempt < MAX_ATTEMPTS:
                break
        else:
            return runs, is_steady
        say("all sides are measured again")
        attempt += 1
