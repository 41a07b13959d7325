"""How fast the machine is: others on the same hardware slow it down, unseen by programs here."""

import time
from collections.abc import Callable

import numpy as np

PROBE_S = 2.0

MAX_CHANGE = 0.2
"""A machine whose speed is within this part of what it was is as fast as it was."""

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
    """Whether the machine is as fast as it was when a measurement began.

    Args:
        first: its speed then; by default it begins now.
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
        self.first = speed() if first is None else first

    def is_kept(self) -> bool:
        """Whether it is; says so where it is not."""
        now = self._speed()
        is_kept = abs(now / self.first - 1.0) <= MAX_CHANGE
        if not is_kept:
            self._say(f"the machine is {now / self.first:.2f} times as fast as at first")
        return is_kept

    def wait_until_kept(self) -> bool:
        """Wait until it is again; returns whether it is, for patience has an end."""
        for _ in range(round(PATIENCE_S / RETRY_S)):
            if self.is_kept():
                return True
            self._wait(RETRY_S)
        return self.is_kept()
