"""Restart policies: back off, and give up after some short lives in a row. Pure."""

from collections.abc import Sequence

SHORT_LIFE_S = 5.0
"""The death of a process that lived for longer says nothing about its successor."""

MAX_SHORT_LIVES = 4
"""After this number of short lives in a row, another successor would not help."""


class RestartLimit:
    """Gives up after `MAX_SHORT_LIVES` processes in a row that died soon after their start."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._num_short = 0

    def on_begun(self, now_s: float) -> None:
        """A process begins its work."""
        self._begun_s = now_s

    def on_death(self, now_s: float) -> bool:
        """The process has died. Returns whether to give up."""
        is_short = now_s - self._begun_s < SHORT_LIFE_S
        self._num_short = self._num_short + 1 if is_short else 0
        return self._num_short >= MAX_SHORT_LIVES


class RestartBackoff:
    """Restarts a process without end: at once, or with growing delays while each dies soon.

    Args:
        short_life_s: a process that lived for longer has not died of the conditions at its start.
        delays_s: times from an end to the next start: the first one after a long life, then one
            after the other for short lives in a row; the last one repeats.
    """

    def __init__(self, short_life_s: float, delays_s: Sequence[float]) -> None:
        self._short_life_s = short_life_s
        self._delays_s = delays_s
        self._begun_s: float | None = None
        self._due_s = 0.0
        self._num_short = 0

    def on_begun(self, now_s: float) -> None:
        """A process begins."""
        self._begun_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time to start the next process."""
        return now_s >= self._due_s

    def on_lost(self, now_s: float) -> str:
        """The process has died, or could not be started; without `on_begun` its life counts as
        long. Returns a text that says when the next one starts."""
        has_lived = self._begun_s is None or now_s - self._begun_s > self._short_life_s
        self._num_short = 0 if has_lived else self._num_short + 1
        delay_s = self._delays_s[min(self._num_short, len(self._delays_s) - 1)]
        self._due_s = now_s + delay_s
        return f"again in {delay_s:.0f} s" if delay_s else "starting it again"
