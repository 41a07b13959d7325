"""Digest of the code that seeds of the fault simulation run.

    python -m bench.simulation.sim_code

A commit id is too fine: most commits do not change the meaning of a seed.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

PACKAGES = {"fault_simulation", "sterna"}


def code_of_seeds() -> str:
    """Twelve digits for the sources of all modules of Sterna and its simulation that a seed loads.

    Raises:
        subprocess.CalledProcessError: a seed cannot be run.
    """
    # In a process of its own, since this one may have loaded other modules.
    done = subprocess.run(
        [sys.executable, "-m", "bench.simulation.sim_code"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _main() -> None:
    from fault_simulation.run import run_seed

    # Some modules are loaded only when they are needed.
    run_seed(0)
    digest = hashlib.sha256()
    for name in sorted(each for each in sys.modules if each.split(".")[0] in PACKAGES):
        path = sys.modules[name].__file__
        assert path is not None
        digest.update(name.encode() + b"\0" + Path(path).read_bytes() + b"\0")
    print(digest.hexdigest()[:12])


if __name__ == "__main__":
    _main()
