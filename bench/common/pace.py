"""How fast the machine is: others on the same hardware slow it down, unseen by programs here."""

import time
from collections.abc import Callable

import numpy as np

PROBE_S = 2.0

MAX_CHANGE = 0.2
"""Runs that are compared are equally fast where the machine's speed differs by no more."""

MAX_DRIFT = 0.35
"""Pairs are comparable, under the same load, where it differs by no more from the first one's."""

RETRY_S = 30.0
PATIENCE_S = 900.0


def speed() -> float:
    """What all cores do together of what engines do, in billions of multiplications a second.

    Nothing else should run meanwhile.
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
    """Whether the machine is as fast as it was.

    Args:
        first: its speed when the measurement began; by default it begins now.
        say: called with what a user should know.
        speed, wait: how they are had.
    """

    def __init__(
        self,
        first: float | None,
        say: Callable[[str], None],
        *,
        speed: Callable[[], float] = speed,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._say = say
        self._speed = speed
        self._wait = wait
        self.first = self._latest = speed() if first is None else first

    def is_kept(self) -> bool:
        """Whether it is as fast as when `wait_until_kept` returned; says so where it is not."""
        return self._is_near(self._speed(), self._latest, MAX_CHANGE, "before")

    def wait_until_kept(self) -> bool:
        """Wait until it is about as fast as at first; returns whether it is, for patience has an
        end."""
        for _ in range(round(PATIENCE_S / RETRY_S)):
            if self._is_as_at_first():
                return True
            self._wait(RETRY_S)
        return self._is_as_at_first()

    def _is_as_at_first(self) -> bool:
        self._latest = self._speed()
        return self._is_near(self._latest, self.first, MAX_DRIFT, "at first")

    def _is_near(self, now: float, then: float, max_change: float, when: str) -> bool:
        is_near = abs(now / then - 1.0) <= max_change
        if not is_near:
            self._say(f"the machine is {now / then:.2f} times as fast as {when}")
        return is_near
