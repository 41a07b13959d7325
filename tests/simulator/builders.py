"""Small simulated clusters: quick to run, and crowded enough to preempt and migrate a lot."""

import hashlib
from dataclasses import fields, replace

import numpy as np

from sterna.config import PolicyConfig
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.metrics.records import ClusterRecord, Records
from sterna.policy.presets import LLUMNIX
from sterna.simulator import SimulationConfig
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.trace import Trace
from sterna.workload.turns import NONE, Turns
from tests.simulator.checked_simulation import simulate_checked

ENGINE = EmulatedEngineConfig(num_blocks=60, max_num_seqs=32, max_num_batched_tokens=512)
"""960 tokens, a few requests' worth."""

STEP_TIME = StepTime(
    prefill_s=0.005,
    prefill_token_s=0.0002,
    prefill_pair_s=4e-9,
    prefill_min_s=0.03,
    decode_s=0.033,
    decode_request_s=0.0008,
    decode_token_s=1.5e-6,
)
COPY_TIME = CopyTime(block_s=0.003, stage_s=0.005)

Result = tuple[Records, ClusterRecord]


def configuration(policy: PolicyConfig = LLUMNIX, **changes: object) -> SimulationConfig:
    """Four small instances."""
    config = SimulationConfig(
        engine=ENGINE, step_time=STEP_TIME, copy_time=COPY_TIME, policy=policy, num_instances=4
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def crowded_trace(
    num_requests: int = 120,
    *,
    seed: int = 1,
    rate: float = 10.0,
    max_input: int = 200,
    max_output: int = 160,
    fraction_high: float = 0.0,
) -> Trace:
    """Poisson arrivals of requests that together want more memory than there is."""
    rng = np.random.default_rng(seed)
    return trace(
        np.cumsum(rng.exponential(1 / rate, num_requests)),
        rng.integers(1, max_input, num_requests),
        rng.integers(1, max_output, num_requests),
        rng.random(num_requests) < fraction_high,
    )


def with_prefixes(trace: Trace, seed: int = 1, block_tokens: int = 20) -> Trace:
    """The trace, with prompts that begin with one of three prefixes or with that of another."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for number in range(len(trace)):
        base = [[0], [1], [2], *prompts[-8:]][rng.integers(0, min(11, 3 + len(prompts)))]
        prompts.append([*base[: rng.integers(0, 8)], *range(10 * number + 3, 10 * number + 6)])
    ids = np.concatenate([np.array(each, np.int64) for each in prompts])
    end = np.cumsum([len(each) for each in prompts])
    return replace(trace, prefix_blocks=PrefixBlocks(ids, end, block_tokens))


def with_sessions(trace: Trace, seed: int = 1) -> Trace:
    """The trace with every request following one of the three before it, if none does so yet."""
    rng = np.random.default_rng(seed)
    previous = np.full(len(trace), NONE, np.int64)
    for row in range(1, len(trace)):
        candidate = row - rng.integers(1, 4)
        if rng.random() < 0.7 and candidate >= 0 and candidate not in previous:
            previous[row] = candidate
    think_s = rng.choice([0.0, 0.1, 0.033, 2.5], len(trace))
    return replace(trace, turns=Turns(previous, np.where(previous == NONE, 0.0, think_s)))


def trace(arrival_s: object, input_tokens: object, output_tokens: object, is_high: object) -> Trace:
    return Trace(
        "test",
        np.array(arrival_s, np.float64),
        np.array(input_tokens, np.int64),
        np.array(output_tokens, np.int64),
        np.array(is_high, np.int64),
    )


def requests(*each: tuple[float, int, int]) -> Trace:
    """Requests of normal priority: arrival in seconds, prompt and output in tokens."""
    arrival_s, input_tokens, output_tokens = zip(*each, strict=True)
    return trace(arrival_s, input_tokens, output_tokens, [0] * len(each))


def content(result: Result) -> dict[str, object]:
    """All of a result, as values that are equal where their bits are; but for the wall's time."""
    found: dict[str, object] = {}
    for part in result:
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, np.ndarray):
                value = (value.dtype.str, value.shape, value.tobytes())
            elif isinstance(value, float):
                value = value.hex()
            found[f"{type(part).__name__}.{field.name}"] = value
    del found["ClusterRecord.wall_s"]
    return found


def differences(one: Result, other: Result) -> list[str]:
    """The fields in which two results differ in a bit."""
    ours, theirs = content(one), content(other)
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if value != theirs[name]]


def digest(result: Result) -> str:
    return hashlib.sha256(repr(sorted(content(result).items())).encode()).hexdigest()


def run(trace: Trace, config: SimulationConfig) -> Result:
    """The records and the cluster's, whose checks have passed after every event."""
    return simulate_checked(trace, config)


def ttft_s(records: Records) -> np.ndarray:
    return records.first_token_s - records.arrival_s
