"""Bounds of what policies can reach, which have rows beside theirs.

- *true lengths*: an oracle that knows the length of each output: Sterna's policy, which moves by
  the loads to come, and whose moves take no time beside the ends of steps.
- *free moves*: Sterna's policy itself, whose moves and copies of prefixes take no time.
- *one pool*: one engine with the memory and the speed of all instances, so that all loads are even
  at each moment, and one prefix cache has what all of them have. It is no bound of first tokens,
  nor of anything where prompts hold up those that decode: a step then has all prompts and all who
  wait for them.
- *each alone*: each request on an idle instance that has all of its prefix that an earlier request
  of the trace had. No policy can have earlier first tokens, or faster ones after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.common.tables import Row, statistic
from bench.policies.contenders import FREE_MOVES, POOLED, TRUE_LENGTHS
from bench.policies.measures import by_third
from sterna.config import PolicyConfig, Soonest
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.metrics.summary import Distribution
from sterna.policy.own import Policy
from sterna.policy.pairing import pair
from sterna.policy.presets import ROUND_ROBIN
from sterna.policy.selection import candidates_to_move
from sterna.policy.virtual_usage import Candidate
from sterna.simulator.engines import index_of
from sterna.simulator.runs import Job
from sterna.types import InstanceId, InstanceView, RequestView
from sterna.workload.block_hashes import BlockHashes
from sterna.workload.catalog import build_trace

HORIZON_STEPS = 1_000
"""The decode steps over which the oracle evens loads out."""


def pooled(job: Job) -> Job:
    """The same requests on one engine in place of all instances, without auto-scaling."""
    config, num = job.config, job.config.num_instances
    engine, step_time = config.engine, config.step_time
    return Job(
        job.workload,
        replace(
            config,
            policy=ROUND_ROBIN,
            num_instances=1,
            engine=replace(
                engine,
                num_blocks=engine.num_blocks * num,
                max_num_seqs=engine.max_num_seqs * num,
                max_num_batched_tokens=engine.max_num_batched_tokens * num,
            ),
            step_time=replace(
                step_time,
                prefill_token_s=step_time.prefill_token_s / num,
                prefill_pair_s=step_time.prefill_pair_s / num,
                decode_request_s=step_time.decode_request_s / num,
                decode_token_s=step_time.decode_token_s / num,
            ),
        ),
        POOLED,
    )


def with_free_moves(job: Job) -> Job:
    """The same requests under the same policy, where copies take no time."""
    config, rule = job.config, job.config.policy.dispatch
    policy = config.policy
    if isinstance(rule, Soonest):
        policy = replace(policy, dispatch=replace(rule, copy_token_cost=0.0, copy_start_cost=0.0))
    no_time = CopyTime(1e-9, 1e-9)
    return Job(
        job.workload,
        replace(config, policy=policy, copy_time=no_time, message_delay_s=0.0),
        FREE_MOVES,
    )


def with_true_lengths(job: Job) -> Job:
    """The same requests under the oracle."""
    policy = TrueLengths(build_trace(job.workload).output_tokens).as_config()
    free = with_free_moves(job)
    return Job(job.workload, replace(free.config, policy=policy), TRUE_LENGTHS)


class TrueLengths(Policy):
    """Sterna's policy, which evens out the mean loads of the next steps, as they will be.

    A move for balance takes the request that will have the largest load, from the instance that
    will have most to the one that will have least.

    Args:
        output_tokens: int64[n], of the requests of the trace.
    """

    base = "sterna"
    settings: Mapping[str, object] = {"num_concurrent_migrations": 4, "balance_after_tokens": 0}

    def __init__(self, output_tokens: NDArray[np.int64] | None = None) -> None:
        super().__init__()
        self._output_tokens: list[int] = [] if output_tokens is None else output_tokens.tolist()
        # Of each instance, its load and that of the request that it would move next: its engine
        # asks for the order of moves with each report.
        self._loads_tokens: dict[InstanceId, tuple[float, float]] = {}

    def with_fresh_state(self, config: PolicyConfig) -> Self:
        """An object with the same knowledge."""
        made = super().with_fresh_state(config)
        made._output_tokens, made._loads_tokens = self._output_tokens, self._loads_tokens
        return made

    def victims(self, instance: InstanceView) -> Sequence[RequestView]:
        """The largest loads to come first, within a class."""
        coming = {each.request_id: self._coming_tokens(each) for each in instance.running}
        order = list(candidates_to_move(instance, self.config))
        if not instance.is_terminating:
            counts_as = self.config.counts_as
            order.sort(
                key=lambda each: (counts_as(each.execution_priority), -coming[each.request_id])
            )
        moved_tokens = coming.get(order[0].request_id, 0.0) if order else 0.0
        self._loads_tokens[instance.instance_id] = sum(coming.values()), moved_tokens
        return order

    def pair(self, instances: Sequence[Candidate]) -> Mapping[InstanceId, InstanceId]:
        """Those that run short of memory first, then by the loads to come."""
        pairs = pair(instances, replace(self.config, balance_ratio=None))
        paired = pairs.keys() | set(pairs.values())
        left = [
            each
            for each in instances
            if each.instance_id not in paired and not each.load.is_terminating
        ]
        left.sort(key=lambda each: (self._loads_tokens[each.instance_id][0], each.instance_id))
        ratio = self.config.balance_ratio
        assert ratio is not None
        for destination, source in zip(left[: len(left) // 2], reversed(left), strict=False):
            load_tokens, moved_tokens = self._loads_tokens[source.instance_id]
            after_tokens = self._loads_tokens[destination.instance_id][0] + moved_tokens
            memory_tokens = source.load.move_tokens
            if memory_tokens is None or memory_tokens > destination.room_tokens:
                continue
            if load_tokens > ratio * after_tokens:
                pairs[source.instance_id] = destination.instance_id
        return pairs

    def _coming_tokens(self, request: RequestView) -> float:
        """The request's mean memory over the horizon; it has none after its end."""
        output_tokens = self._output_tokens[index_of(request.request_id)]
        num_steps = min(output_tokens - request.num_output_tokens, HORIZON_STEPS)
        return num_steps * (request.num_tokens + num_steps / 2) / HORIZON_STEPS


def alone(job: Job) -> Row:
    """The latencies of the requests of which each is alone."""
    trace, config = build_trace(job.workload), job.config
    cached_tokens = np.zeros(len(trace), np.int64)
    if config.engine.prefix_caching:
        cached_tokens = BlockHashes.of(trace, config.engine.block_size).reusable_tokens
    ttft_s = _prefill_s(config.step_time, trace.input_tokens, trace.input_tokens - cached_tokens)
    tpot_s = _decode_s(config.step_time, trace.input_tokens, trace.output_tokens)
    durations = {
        "ttft": ttft_s,
        "tpot": tpot_s[trace.output_tokens > 1],
        "request": ttft_s + tpot_s * (trace.output_tokens - 1),
    }
    latencies = {
        f"{name}_{which}_s": statistic(Distribution.of(values), which)
        for name, values in durations.items()
        for which in ("mean", "p90", "p99")
    }
    return {"n": len(trace), **latencies, **by_third(ttft_s, trace.input_tokens)}


def _prefill_s(
    step_time: StepTime, prompt_tokens: NDArray[np.int64], uncomputed: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The durations of steps that compute one prompt each."""
    return np.array(
        [
            step_time.duration_s(num, num * (2 * prompt - num), 0, 0)
            for prompt, num in zip(prompt_tokens.tolist(), uncomputed.tolist(), strict=True)
        ]
    )


def _decode_s(
    step_time: StepTime, prompt_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The mean durations of steps that decode one request each."""
    mean_tokens: NDArray[np.float64] = prompt_tokens + output_tokens / 2
    single_s = step_time.decode_s + step_time.decode_request_s
    return single_s + step_time.decode_token_s * mean_tokens
