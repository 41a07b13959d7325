"""Cost of migration for requests that do not migrate.

- `measure` copy: decode steps of a busy source's other requests while a request's KV cache is
  copied away, by how the copy is cut and paced (`TransportConfig`);
- `measure` throughput: tokens per second of a balanced pair of busy instances while pairing
  rounds are held in which nothing moves, and while none are held, in turns.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from bench.common.results_io import summary
from bench.migration.cluster_driver import Driver
from bench.migration.samples import Sample
from bench.migration.session import INSTANCES, Session
from sterna.config import PolicyConfig, TransportConfig
from sterna.migration.messages import Mode
from sterna.policy.presets import LLUMNIX

COPY_TOKENS = 8192
COPY_TRANSPORTS = {
    "chunked and paced (default)": TransportConfig(),
    "chunked, not paced": TransportConfig(bandwidth_share=1.0),
    # Larger than the whole cache of a request of 8k tokens.
    "one chunk, not paced": TransportConfig(bandwidth_share=1.0, chunk_bytes=256 << 20),
}

RUN_REQUESTS, RUN_PROMPT_TOKENS, RUN_OUTPUTS = 8, 64, 128
"""Requests on each instance in each run of the throughput's measurement."""


async def copy_row(driver: Driver, name: str, transport: TransportConfig, count: int) -> Any:
    """Migrates `count` times live between busy instances; returns the row."""
    session = Session(driver, busy=True, seed=1)
    await session.warm_up([Mode.LIVE])
    taken = await session.samples(COPY_TOKENS, {Mode.LIVE: count})
    return _copy_row(name, transport, taken[Mode.LIVE])


def _copy_row(name: str, transport: TransportConfig, samples: Sequence[Sample]) -> dict[str, Any]:
    migrating_ms = [step for s in samples for step in s.migrating_steps_ms]
    return {
        "measure": "copy",
        "copying": name,
        "transport": transport.kind,
        "chunk_bytes": transport.chunk_bytes,
        "bandwidth_share": transport.bandwidth_share,
        "tokens": COPY_TOKENS,
        "n": len(samples),
        "decode_step_ms": summary([step for s in samples for step in s.steps_ms]),
        "decode_step_migrating_ms": summary(migrating_ms),
        "longest_step_ms": summary([max(s.migrating_steps_ms) for s in samples]),
        "migration_ms": summary([s.migration_ms for s in samples]),
        "downtime_ms": summary([s.downtime_ms for s in samples]),
    }


async def throughput_rows(driver: Driver, num_pairs: int) -> list[dict[str, Any]]:
    """Measures `num_pairs` pairs of runs, one with and one without rounds, in turns."""
    policies = {"enabled": LLUMNIX, "disabled": replace(LLUMNIX, migrates=False)}
    schedulers = {name: await driver.start_scheduler(policies[name]) for name in policies}
    random = Random(1)
    found: dict[str, list[float]] = {name: [] for name in policies}
    await _run(driver, random)
    for pair in range(num_pairs):
        # Each is first in half of the pairs, so that a machine that warms up favours neither.
        for name in sorted(policies, reverse=pair % 2 == 1):
            driver.use_scheduler(schedulers[name])
            found[name].append(await _run(driver, random))
    driver.use_scheduler(None)
    ratios = [on / off for on, off in zip(found["enabled"], found["disabled"], strict=True)]
    rows = [_throughput_row(name, policies[name], found[name]) for name in policies]
    ratio = {"measure": "throughput_ratio", "n": num_pairs, "enabled_to_disabled": summary(ratios)}
    return [*rows, ratio]


def _throughput_row(name: str, policy: PolicyConfig, found: Sequence[float]) -> dict[str, Any]:
    return {
        "measure": "throughput",
        "migration": name,
        "round_interval_s": policy.round_interval_s if policy.migrates else None,
        "n": len(found),
        "tokens_per_s": summary(found),
    }


async def _run(driver: Driver, random: Random) -> float:
    """Tokens per second of a fixed batch on each instance, prefill included."""
    begun_s = time.monotonic()
    streams = [
        driver.submit(
            [random.randrange(40_000) for _ in range(RUN_PROMPT_TOKENS)],
            instance,
            num_outputs=RUN_OUTPUTS,
        )
        for instance in INSTANCES
        for _ in range(RUN_REQUESTS)
    ]
    for stream in streams:
        await stream.until(lambda stream=stream: stream.is_finished)  # type: ignore[misc]
    return len(streams) * RUN_OUTPUTS / (time.monotonic() - begun_s)
