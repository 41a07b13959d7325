"""How far a run of many seeds is, in a file: what is done is not done again.

Seeds are done in any number of ranges, one after the other, which add up as long as all are of one
commit.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sterna.errors import ConfigurationError
from sterna.hostile.run import Result


class Progress(msgspec.Struct):
    """What the seeds so far came to.

    Attributes:
        done: ranges, each as its first seed and the one after its last; they neither overlap nor
            touch, and are in order.
        wall_s: of all runs together.
        violations: seeds that broke a promise, with which.
    """

    commit: str
    overlap: bool
    done: list[tuple[int, int]] = msgspec.field(default_factory=list)
    num_events: int = 0
    wall_s: float = 0.0
    violations: dict[int, str] = msgspec.field(default_factory=dict)
    counts: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def num_seeds(self) -> int:
        """How many are done."""
        return sum(end - first for first, end in self.done)

    def left(self, first: int, end: int) -> Iterator[int]:
        """The seeds of this range that are not done, in order."""
        ranges = []
        for done_first, done_end in [*self.done, (end, end)]:
            ranges.append(range(first, min(done_first, end)))
            first = max(first, done_end)
        return itertools.chain.from_iterable(ranges)

    def num_left(self, first: int, end: int) -> int:
        """How many seeds of this range are not done."""
        overlaps = (min(e, end) - max(f, first) for f, e in self.done)
        return end - first - sum(max(0, each) for each in overlaps)

    def add(self, result: Result) -> None:
        """Count a seed in that was not done."""
        self._note_done(result.seed)
        self.num_events += result.num_events
        for what, count in result.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count
        if result.violation is not None:
            self.violations[result.seed] = result.violation

    def _note_done(self, seed: int) -> None:
        # Nearly always the next one of a range.
        for index, (first, end) in enumerate(self.done):
            if end == seed:
                self.done[index] = (first, seed + 1)
                break
        else:
            self.done.append((seed, seed + 1))
        self.done.sort()
        for index in range(len(self.done) - 1, 0, -1):
            if self.done[index - 1][1] == self.done[index][0]:
                self.done[index - 1 : index + 1] = [(self.done[index - 1][0], self.done[index][1])]

    def save(self, path: Path) -> None:
        """Replace the file as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        partial.replace(path)


def load(path: Path, commit: str, *, overlap: bool) -> Progress:
    """What `save` wrote.

    Raises:
        ConfigurationError: there is none, or of something else than this.
    """
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} is not there: run without --continue") from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is no progress of seeds: {error}") from error
    if (progress.commit, progress.overlap) != (commit, overlap):
        kind = " with --overlap" if progress.overlap else ""
        raise ConfigurationError(
            f"{path} is of commit {progress.commit}{kind}: the seeds mean something else here; run "
            "without --continue"
        )
    return progress
