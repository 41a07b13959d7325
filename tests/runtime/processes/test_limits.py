"""How many files a process may have open, by its limits; each case is a process of its own, which
could not raise its limits again."""

import subprocess
import sys

import pytest

SCRIPT = """
import logging, resource, sys
from sterna.runtime.processes import limits
soft, hard, limits.ENOUGH = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
limits.raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""

WARNING = (
    "few files may be open, each client takes one limit=1024; raise it with ulimit -Hn 65536\n"
)


@pytest.mark.parametrize(
    ("soft", "hard", "enough", "said"),
    [
        pytest.param(256, 10_000, 65_536, "10000 10000\n", id="as many as it may"),
        pytest.param(256, 10_000, 9_000, "9000 10000\n", id="as many as are enough"),
        pytest.param(9_500, 10_000, 9_000, "9500 10000\n", id="never fewer"),
        pytest.param(256, 8_192, 65_536, "8192 8192\n", id="just enough for no word"),
        pytest.param(256, 1_024, 65_536, WARNING + "1024 1024\n", id="few"),
    ],
)
def test_a_process_may_open_as_many_files_as_it_may_and_needs(
    soft: int, hard: int, enough: int, said: str
) -> None:
    numbers = map(str, (soft, hard, enough))
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *numbers], capture_output=True, text=True, check=True
    )
    assert ended.stdout == said
