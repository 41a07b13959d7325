"""Checks the model of the migration handshake, `models/migration.pml`, with spin
(docs/internals/model.md).

`python -m bench.simulation.model_check` explores every state within the bounds of `FULL`, then
checks that each rule left out on purpose (`BREAKS`) is found, and writes the result file; `--short`
uses the smaller bounds of `SHORT`, and writes nothing.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import results_io
from sterna.errors import ConfigurationError

MODELS = results_io.ROOT / "models"
MODEL = "migration.pml"
MAX_DEPTH = 1_000_000
MEMORY_MIB = 12_000

SAFETY = "safety"
"""Never two owners, memory conserved, nothing freed while it is sent, no illegal event: with any
number of messages lost, repeated and overtaken, and every time-out at any moment."""
LIVENESS = "liveness"
"""The same, and in the end one owner or none that is wanted, and nothing left: under weak fairness,
after every combination of `num_faults` faults."""


@dataclass(frozen=True, slots=True)
class Check:
    """One exploration: the model with these bounds, and perhaps one rule left out.

    Attributes:
        num_faults: None: no bound; for safety only.
        has_recovery: whether a death puts the request in doubt (front end).
    """

    name: str
    num_stages: int
    num_reservations: int
    num_faults: int | None = None
    has_recovery: bool = True
    broken: str | None = None

    @property
    def kind(self) -> str:
        return SAFETY if self.num_faults is None else LIVENESS

    def defines(self) -> list[str]:
        """The options of spin's preprocessor."""
        return [
            f"-DSTAGES={self.num_stages}",
            f"-DRESERVATIONS={self.num_reservations}",
            *([] if self.num_faults is None else [f"-DFAULTS={self.num_faults}"]),
            *([] if self.has_recovery else ["-DWITHOUT_RECOVERY"]),
            *([] if self.broken is None else [f"-DBREAK_{self.broken}"]),
        ]


@dataclass(frozen=True, slots=True)
class Explored:
    """The result of one exploration.

    Attributes:
        violated: the violation, in spin's words; None when all states were explored without one.
        depth: the length of the longest path, in steps.
    """

    violated: str | None
    num_states: int
    num_transitions: int
    depth: int
    wall_s: float


SHORT = (
    Check("short safety", 1, 1, has_recovery=False),
    Check("short liveness", 1, 1, num_faults=1, has_recovery=False),
)
FULL = (
    Check("two stages", num_stages=2, num_reservations=1),
    Check("late copies of Reserve", num_stages=1, num_reservations=2, has_recovery=False),
    Check("a fault in any stage", num_stages=2, num_reservations=2, num_faults=1),
    Check("two faults", num_stages=1, num_reservations=2, num_faults=2, has_recovery=False),
)


def _broken(
    rule: str, *, num_stages: int = 1, num_reservations: int = 1, num_faults: int | None = None
) -> Check:
    return Check(
        f"break {rule.lower()}", num_stages, num_reservations, num_faults=num_faults, broken=rule
    )


BREAKS = (
    _broken("RELEASES_BEFORE_COMMITTED"),
    _broken("RESUMES_ON_A_TIME_OUT"),
    _broken("ADOPTS_WITHOUT_CHECKING"),
    _broken("IGNORES_THE_ABORT", num_faults=1),
    _broken("SAYS_ABORTED_BUT_GOES_ON"),
    _broken("FORGETS_THAT_IT_ADOPTED"),
    _broken("RESERVATIONS_HAVE_NO_NUMBERS", num_reservations=2),
    _broken("MOVES_ON_BEFORE_RELEASED"),
    _broken("PREEMPTIONS_ARE_NOT_COMPARED", num_stages=2),
    _broken("ENDS_BEFORE_THE_DRAIN_IS_OVER", num_faults=1),
    _broken("NEVER_ASKS_AGAIN", num_faults=1),
    _broken("HAS_NO_LEASE", num_faults=1),
    _broken("TELLS_OF_A_LAST_STAGE"),
    _broken("CLAIMS_WHAT_IT_GIVES_AWAY", num_faults=1),
    _broken("BELIEVES_ALL_DENIALS"),
)
"""Each rule of the protocol left out once, in the smallest bounds that show it."""


def missing_tool() -> str | None:
    """The missing tool, and how to install it; None when the model can be checked."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: apt-get install {tool}"
    return None


def explore(check: Check) -> Explored:
    """Explores all states, or until the first violation.

    Raises:
        ConfigurationError: a tool is missing, or the bounds of depth or memory were reached.
    """
    if (missing := missing_tool()) is not None:
        raise ConfigurationError(missing)
    with tempfile.TemporaryDirectory(prefix="sterna-model-") as name:
        folder = Path(name)
        for source in MODELS.glob("*.pml"):
            shutil.copy(source, folder)
        _call(folder, "spin", "-a", *check.defines(), MODEL)
        # Spin writes one function of some 10,000 lines, whose optimization takes longer
        # than most explorations.
        options = ("-O0", "-w", "-DNOREDUCE", "-DCOLLAPSE", "-DNFAIR=3", f"-DMEMLIM={MEMORY_MIB}")
        _call(folder, "gcc", *options, "-o", "pan", "pan.c")
        begin_s = time.monotonic()
        fairness = ("-f",) if check.kind == LIVENESS else ()
        said = _call(folder, "./pan", "-a", *fairness, f"-m{MAX_DEPTH}", is_checked=False)
        wall_s = time.monotonic() - begin_s
    return _read(said, wall_s)


def _read(said: str, wall_s: float) -> Explored:
    """Parse the checker's output."""
    violation = re.search(r"pan:1: (.*) \(at depth", said)
    errors = re.search(r"depth reached (\d+), errors: (\d+)", said)
    states = re.search(r"([\d.e+]+) states, stored", said)
    transitions = re.search(r"([\d.e+]+) transitions", said)
    if errors is None or states is None or transitions is None:
        raise ConfigurationError(f"spin's checker failed: {said.strip()[-300:]}")
    if violation is None and ("not completed" in said or "too small" in said):
        raise ConfigurationError("the model has more states than memory or depth allow")
    assert (violation is None) == (errors[2] == "0"), said
    return Explored(
        violated=None if violation is None else violation[1],
        num_states=int(float(states[1])),
        num_transitions=int(float(transitions[1])),
        depth=int(errors[1]),
        wall_s=round(wall_s, 1),
    )


def _call(folder: Path, *command: str, is_checked: bool = True) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if is_checked and done.returncode != 0:
        raise ConfigurationError(f"{command[0]} failed: {said.strip()[:300]}")
    return said


def _row(check: Check, explored: Explored) -> dict[str, Any]:
    return {
        "check": check.name,
        "property": check.kind,
        "broken": check.broken,
        "violated": explored.violated is not None,
        "stages": check.num_stages,
        "reservations": check.num_reservations,
        "recovery": check.has_recovery,
        "faults": "any number" if check.num_faults is None else check.num_faults,
        "n": 1,
        "states": explored.num_states,
        "transitions": explored.num_transitions,
        "depth": explored.depth,
        "wall_s": explored.wall_s,
    }


def run(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Runs the explorations, prints their results, and returns the rows."""
    rows = []
    for check in checks:
        explored = explore(check)
        rows.append(_row(check, explored))
        outcome = "holds" if explored.violated is None else f"VIOLATED: {explored.violated[:60]}"
        print(
            f"{check.name}: {check.kind} {outcome}; {explored.num_states} states, "
            f"{explored.num_transitions} transitions, depth {explored.depth}, {explored.wall_s} s",
            flush=True,
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the protocol holds and every broken one is noticed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation.model_check", description=__doc__
    )
    parser.add_argument("--short", action="store_true", help="small bounds; write nothing")
    options = parser.parse_args(arguments)
    try:
        held = run(SHORT if options.short else FULL)
        print("Each of these has one rule left out, and must be found:")
        found = run(BREAKS)
    except ConfigurationError as error:
        print(f"model-check: {error}", file=sys.stderr)
        return 2
    wrong = [row["check"] for row in held if row["violated"]]
    unnoticed = [row["check"] for row in found if not row["violated"]]
    if not options.short:
        results_io.write(
            "model_check",
            {"model": f"models/{MODEL}", "properties": {SAFETY: _SAYS, LIVENESS: _SAYS_LIVENESS}},
            [*held, *found],
            summary={
                "violations": len(wrong),
                "states": sum(row["states"] for row in held),
                "transitions": sum(row["transitions"] for row in held),
                "depth": max(row["depth"] for row in held),
                "wall_s": round(sum(row["wall_s"] for row in held), 1),
                "breaks": len(found),
                "breaks_found": len(found) - len(unnoticed),
            },
        )
    for each in wrong:
        print(f"model-check: {each} is violated", file=sys.stderr)
    for each in unnoticed:
        print(f"model-check: {each} was not noticed", file=sys.stderr)
    return 1 if wrong or unnoticed else 0


_SAYS = (
    "at most one owner; memory conserved on both sides; nothing freed while it is sent; adopted "
    "with all blocks in place; no event that the code calls illegal"
)
_SAYS_LIVENESS = (
    "with weak fairness, in the end: both sides have forgotten the migration, nothing is left "
    "reserved, and the request has one owner, or none when it ended or its client has gone"
)

if __name__ == "__main__":
    sys.exit(main())
