"""Whether it helps to replace a process once more that has died again. Pure."""

SHORT_LIFE_S = 5.0
"""Who has lived for longer has done its work; its death says nothing of its successor."""

MAX_SHORT_LIVES = 4
"""In a row: with so many, another successor would not help."""


class Succession:
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
