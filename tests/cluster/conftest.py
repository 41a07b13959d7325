"""One Ray and one asyncio loop for all cluster tests, and instances that tests share.

An instance takes long to start, so tests share two pairs as far as they can: `small`, which is
what `make serve` serves, and `tiny`, whose steps take milliseconds and whose memory is scarce.
A test leaves a pair as it found it, which is checked behind each.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from sterna.cli.serve.read_options import parse
from sterna.cli.serve.serve_command import engine_environment
from sterna.config import MigrationConfig, TransportConfig
from sterna.policy.presets import LLUMNIX
from tests.cluster.pair import InstancePair
from tests.models import tiny_random_llama

Run = Callable[[Coroutine[Any, Any, Any]], Any]
MakePair = Callable[..., InstancePair]

LEASE_S = 10.0
"""Longer than a test holds a migration whose lease is not to end."""
COPY_TIMEOUT_S = 60.0
"""Far above the default: a machine that others use too may stand still for some seconds, and a copy
that fails for that says nothing of the tokens."""
BLOCK_SIZE = 32
NUM_TINY_BLOCKS = 40
"""Blocks of a tiny instance, of which requests can use one less."""

TINY_OPTIONS = (
    # In float32 what a request says does not depend on who shares its batch.
    *("--dtype", "float32"),
    *("--block-size", str(BLOCK_SIZE)),
    *("--max-model-len", "1024"),
    *("--max-num-batched-tokens", "256"),
    *("--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
    "--enforce-eager",
)


def patient_transport(kind: str) -> TransportConfig:
    """The transport whose transfers may stand still for as long, and begin as late."""
    return TransportConfig(kind=kind, timeout_s=COPY_TIMEOUT_S, begin_timeout_s=COPY_TIMEOUT_S)


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # As in `sterna serve`: with Ray's default, instances yield to the tests that run beside them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level="warning",
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="package")
def run(loop: asyncio.AbstractEventLoop) -> Run:
    """Runs a coroutine on the loop that the instances' mailboxes belong to."""
    return loop.run_until_complete


@pytest.fixture(scope="package")
def make_pair(ray_cluster: None, run: Run) -> Iterator[MakePair]:
    """Starts instances with options of `sterna serve`; closed at the end at the latest."""
    pairs: list[InstancePair] = []

    def make(*options: str, **settings: Any) -> InstancePair:
        pair = InstancePair(parse(["serve", *options]), engine_environment(), **settings)
        pairs.append(pair)
        run(pair.start())
        return pair

    yield make
    for pair in pairs:
        if not pair.is_closed:
            run(pair.close())


@pytest.fixture(scope="package")
def shared_small(make_pair: MakePair) -> InstancePair:
    return make_pair(
        transport=patient_transport("shm"),
        migration=MigrationConfig(lease_s=COPY_TIMEOUT_S),
    )


@pytest.fixture
def small(shared_small: InstancePair, run: Run) -> Iterator[InstancePair]:
    """Two instances of the small model, as `make serve` starts them: in bfloat16 where the CPU has
    AVX-512."""
    yield shared_small
    run(shared_small.settle())


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random_llama(tmp_path_factory.mktemp("models") / "tiny", seed=5)


@pytest.fixture(scope="package")
def make_tiny(make_pair: MakePair, tiny_model: Path) -> MakePair:
    """Starts instances of a tiny random model in float32; several migrations at once, and a
    lease short enough to wait for."""

    def make(*options: str, **settings: Any) -> InstancePair:
        settings.setdefault("policy", replace(LLUMNIX, num_concurrent_migrations=4))
        settings.setdefault("migration", MigrationConfig(lease_s=LEASE_S, query_interval_s=0.5))
        return make_pair(str(tiny_model), *TINY_OPTIONS, *options, **settings)

    return make


@pytest.fixture(scope="package")
def shared_tiny(make_tiny: MakePair) -> InstancePair:
    return make_tiny(
        "--num-gpu-blocks-override",
        str(NUM_TINY_BLOCKS),
        "--no-enable-prefix-caching",
        # What a test holds is given up by its lease, not for a copy without progress.
        transport=TransportConfig(kind="tcp", timeout_s=3 * LEASE_S),
    )


@pytest.fixture
def tiny(shared_tiny: InstancePair, run: Run) -> Iterator[InstancePair]:
    """Two instances of the tiny model with little memory and no prefix cache, over TCP."""
    yield shared_tiny
    run(shared_tiny.settle())
