"""Simulations of points under policies, and their rows."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from bench.common.command import simulation_progress
from bench.common.tables import Row
from bench.policies.families import Point
from bench.policies.measures import row_of
from sterna.cli.simulate.simulate_command import configuration, jobs_of
from sterna.cli.simulate.simulate_options import add_simulate_options
from sterna.policy.presets import ROUND_ROBIN
from sterna.simulator.runs import Job, map_runs

POOLED = "one pool"
"""The name of the bound in rows."""

QUICK_REQUESTS = 100
"""Of a run that only checks; its numbers have no meaning."""


def jobs(
    point: Point,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    has_bound: bool = False,
    is_quick: bool = False,
) -> list[Job]:
    """The runs of a point: for each policy one for each seed, and as many of the bound."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_simulate_options(parser)
    args = parser.parse_args([*point.options, "--seed", *map(str, seeds)])
    found = jobs_of(args, {policy: configuration(args, policy) for policy in policies})
    if has_bound:
        found += [pooled(each) for each in found[: len(seeds)]]
    if not is_quick:
        return found
    return [
        replace(each, workload=replace(each.workload, num_requests=QUICK_REQUESTS))
        for each in found
    ]


def pooled(job: Job) -> Job:
    """The same requests on one engine that has the memory and the speed of all instances.

    It is what balancing can reach at most: all loads are even at each moment, and moves cost
    nothing. Of first tokens it is no bound that can be reached, since a prompt does not spread over
    instances.
    """
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


def rows_of(
    family: str,
    point: Point,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    has_bound: bool = False,
    is_quick: bool = False,
    num_processes: int | None = None,
) -> list[Row]:
    """The rows of a point: of its policies and all seeds."""
    planned = jobs(point, policies, seeds, has_bound=has_bound, is_quick=is_quick)
    with simulation_progress() as progress:
        task = progress.add_task(f"{family}: {point.name}", total=len(planned))
        results = map_runs(
            planned,
            row_of,
            num_processes=num_processes,
            on_done=lambda _: progress.advance(task),
        )
    return [
        {
            "family": family,
            "point": point.name,
            "policy": job.policy,
            "seed": job.workload.seed,
            **row,
        }
        for job, (row,) in zip(planned, results, strict=True)
    ]
