"""Options of `sterna bench priorities`, and the plan of the measurement."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.common.command import positive as count
from bench.serving.comparing import add_common_options, results_folder, serve_options
from sterna.cli.options.option_values import positive
from sterna.errors import ConfigurationError

POLICIES = {"on": "llumnix", "off": "llumnix-base"}

QUICK_RATE, QUICK_SECONDS = 4.0, 15.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        serve: options of all servers.
        rate: None where it is to be measured.
        load_share: of the measured throughput, where the rate is None.
        is_continued: whether the pairs of the folder's results count.
        is_quick: whether the run only checks that everything works.
    """

    serve: tuple[str, ...]
    instances: int
    pairs: int
    rate: float | None
    load_share: float
    seconds: float
    cv: float
    high_fraction: float
    seed: int
    target_load: int | None
    folder: Path
    is_continued: bool
    is_quick: bool

    @property
    def seeds(self) -> range:
        """The seeds, one for each pair."""
        return range(self.seed, self.seed + self.pairs)

    def options(self, side: str) -> list[str]:
        """Return the options of the server of a side."""
        more = ["--instances", str(self.instances), "--policy", POLICIES[side]]
        if side == "on" and self.target_load is not None:
            more += ["--target-load", str(self.target_load)]
        return [*self.serve, *more]


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan for these options.

    Raises:
        ConfigurationError: an option is invalid.
    """
    if not 0.0 < options.high_fraction < 1.0:
        raise ConfigurationError(
            f"--high-fraction must be above 0 and below 1, not {options.high_fraction:g}: both "
            "classes are compared"
        )
    quick = options.quick
    return Plan(
        serve=serve_options(options),
        instances=options.instances,
        pairs=1 if quick else options.pairs,
        rate=options.rate or (QUICK_RATE if quick else None),
        load_share=options.load_share,
        seconds=QUICK_SECONDS if quick else options.seconds,
        cv=options.cv,
        high_fraction=options.high_fraction,
        seed=options.seed,
        target_load=options.target_load,
        folder=results_folder(options),
        is_continued=options.is_continued,
        is_quick=quick,
    )


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="sterna bench priorities",
        description="Measures the gain of urgent requests from priorities, and the cost for the "
        "others.",
        epilog="docs/benchmarks.md explains what is measured.",
    )
    add_common_options(parser, quick="one short pair on emulated instances")
    parser.add_argument("--pairs", type=count, default=30, help="of runs (default: %(default)s)")
    parser.add_argument(
        "--continue",
        dest="is_continued",
        action="store_true",
        help="measure only the pairs that the results lack; needs the same options",
    )
    parser.add_argument("--instances", type=count, default=2, help="default: %(default)s")
    parser.add_argument(
        "--target-load", type=count, metavar="TOKENS", help="default: what `sterna serve` finds"
    )
    parser.add_argument(
        "--rate", type=positive, help="requests a second (default: by --load-share)"
    )
    parser.add_argument(
        "--load-share",
        type=positive,
        default=0.6,
        metavar="SHARE",
        help="rate, as a part of the throughput in a burst (default: %(default)g)",
    )
    parser.add_argument(
        "--seconds", type=positive, default=60.0, help="length of each run (default: %(default)g)"
    )
    parser.add_argument(
        "--cv",
        type=positive,
        default=4.0,
        help="coefficient of variation of the gaps between requests (default: %(default)g)",
    )
    parser.add_argument(
        "--high-fraction",
        type=positive,
        default=0.1,
        metavar="SHARE",
        help="fraction of high requests (default: %(default)g)",
    )
    return parser
