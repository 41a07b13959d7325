"""Whether it helps to replace a process once more that has died again, and when. Pure."""

from collections.abc import Sequence

SHORT_LIFE_S = 5.0
"""Who has lived for longer has done its work; its death says nothing of its successor."""

MAX_SHORT_LIVES = 4
"""In a row: with so many, another successor would not help."""


class RestartLimit:
    """One process after the other, each in the place of the one before."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._num_short = 0

    def on_begun(self, now_s: float) -> None:
        """One begins its work."""
        self._begun_s = now_s

    def is_hopeless(self, now_s: float) -> bool:
        """It has died. Returns whether another one would not help; to be asked once a death."""
        is_short = now_s - self._begun_s < SHORT_LIFE_S
        self._num_short = self._num_short + 1 if is_short else 0
        return self._num_short >= MAX_SHORT_LIVES


class Restarts:
    """One process after the other, without end: each at once, or later where others died soon.

    Args:
        short_life_s: who has lived for longer has not died of what it found at its start.
        delays_s: from the end of one to the start of the next: the first after one that has lived,
            the others in turn while each dies soon; the last one repeats.
    """

    def __init__(self, short_life_s: float, delays_s: Sequence[float]) -> None:
        self._short_life_s = short_life_s
        self._delays_s = delays_s
        self._begun_s: float | None = None
        self._due_s = 0.0
        self._num_short = 0

    def on_begun(self, now_s: float) -> None:
        """One begins."""
        self._begun_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time for the next one."""
        return now_s >= self._due_s

    def on_lost(self, now_s: float) -> str:
        """It has died, or could not be started; one of whose begin nothing was said has lived.
        Returns when the next one starts, in words."""
        has_lived = self._begun_s is None or now_s - self._begun_s > self._short_life_s
        self._num_short = 0 if has_lived else self._num_short + 1
        delay_s = self._delays_s[min(self._num_short, len(self._delays_s) - 1)]
        self._due_s = now_s + delay_s
        return f"again in {delay_s:.0f} s" if delay_s else "starting it again"
