"""Progress file of a run of many seeds, so that no seed is run twice.

Seeds are run in any number of ranges, one after the other, which add up as long as all are of the
same code. A run that is too long for one day of a machine can also continue from its results.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.common import results_io
from fault_simulation.run import Result
from sterna.errors import ConfigurationError

NAME = "sim_soak"


class Progress(msgspec.Struct):
    """The results of the seeds so far.

    Attributes:
        code: the digest of the code that the seeds ran (`sim_code`).
        done: the ranges that were run, each as its first seed and the one after its last; they
            neither overlap nor touch, and are in order.
        wall_s: time of all runs together.
        violations: the seeds that broke a promise, with the promise.
    """

    code: str
    overlap: bool
    done: list[tuple[int, int]] = msgspec.field(default_factory=list)
    num_events: int = 0
    wall_s: float = 0.0
    violations: dict[int, str] = msgspec.field(default_factory=dict)
    counts: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def num_seeds(self) -> int:
        """The number of seeds that were run."""
        return sum(end - first for first, end in self.done)

    def left(self, first: int, end: int) -> Iterator[int]:
        """The remaining seeds of this range, in order."""
        ranges = []
        for done_first, done_end in [*self.done, (end, end)]:
            ranges.append(range(first, min(done_first, end)))
            first = max(first, done_end)
        return itertools.chain.from_iterable(ranges)

    def num_left(self, first: int, end: int) -> int:
        """The number of remaining seeds of this range."""
        overlaps = (min(e, end) - max(f, first) for f, e in self.done)
        return end - first - sum(max(0, each) for each in overlaps)

    def add(self, result: Result) -> None:
        """Add the result of a remaining seed."""
        self._note_done(result.seed)
        self.num_events += result.num_events
        for what, count in result.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count
        if result.violation is not None:
            self.violations[result.seed] = result.violation

    def _note_done(self, seed: int) -> None:
        # The seed is nearly always the next one of a range.
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


def load(path: Path, code: str, *, overlap: bool) -> Progress:
    """Read the file of `save`.

    Raises:
        ConfigurationError: there is no file, or it has another content.
    """
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} is not there: run without --continue") from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is no progress of seeds: {error}") from error
    return _same(progress, path, code, overlap=overlap)


def load_results(folder: Path, code: str, *, overlap: bool) -> Progress:
    """Read the results of `write`.

    Raises:
        ConfigurationError: there are no results, or they have another content.
    """
    path = folder / f"{NAME}.json"
    try:
        document = results_io.read(NAME, folder)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} is not there: run without --continue") from error
    config, summary = document["config"], document["summary"]
    progress = Progress(
        config["code"],
        config["overlap"],
        [(first, end) for first, end in config["seeds"]],
        summary["events"],
        summary["wall_s"],
        {row["seed"]: row["violation"] for row in document["rows"]},
        document["happened"],
    )
    return _same(progress, path, code, overlap=overlap)


def write(progress: Progress, num_workers: int, folder: Path) -> Path:
    """Write the results so far."""
    return results_io.write(
        NAME,
        {
            "code": progress.code,
            "seeds": [list(each) for each in progress.done],
            "workers": num_workers,
            "overlap": progress.overlap,
        },
        [
            {"seed": seed, "violation": violation}
            for seed, violation in sorted(progress.violations.items())
        ],
        folder,
        summary={
            "seeds": progress.num_seeds,
            "violations": len(progress.violations),
            "events": progress.num_events,
            "wall_s": round(progress.wall_s, 1),
            "seeds_per_hour": round(progress.num_seeds / progress.wall_s * 3600),
        },
        more={"happened": dict(sorted(progress.counts.items()))},
    )


def _same(progress: Progress, path: Path, code: str, *, overlap: bool) -> Progress:
    if (progress.code, progress.overlap) != (code, overlap):
        kind = " with --overlap" if progress.overlap else ""
        raise ConfigurationError(
            f"{path} is of other code ({progress.code}{kind}): the seeds mean something else here; "
            "run without --continue"
        )
    return progress
