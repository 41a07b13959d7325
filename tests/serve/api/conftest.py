"""One Sterna for all of these tests, and what plain vLLM answered before."""

from collections.abc import Iterator

import pytest

from tests.serve.bad_requests import BAD_REQUESTS
from tests.serve.cases import CASES, Answer
from tests.serve.server import ServerProcess, start_plain, start_sterna

# What is computed from cached blocks differs in bfloat16 from what is computed anew, and which
# blocks are cached depends on the instance.
WITHOUT_CACHE = "--no-enable-prefix-caching"


@pytest.fixture(scope="package")
def plain_answers() -> dict[str, Answer]:
    """What plain vLLM answers to every case, one at a time, and to every bad request."""
    server = start_plain(WITHOUT_CACHE)
    try:
        answers = {case.name: case.send(server) for case in CASES}
        return answers | {bad.name: bad.send(server) for bad in BAD_REQUESTS}
    finally:
        server.end()


@pytest.fixture(scope="package")
def sterna() -> Iterator[ServerProcess]:
    """Two instances, whose requests move only when a test moves them."""
    server = start_sterna("--no-migration", WITHOUT_CACHE)
    yield server
    server.end()
