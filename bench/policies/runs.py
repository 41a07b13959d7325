"""Simulations of points under policies, and their rows."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from bench.common.command import simulation_progress
from bench.common.tables import Row
from bench.policies import contenders
from bench.policies.bounds import alone, pooled, with_free_moves, with_true_lengths
from bench.policies.contenders import DERIVED, ENGINE_COSTS, SOLO, STERNA
from bench.policies.families import Point
from bench.policies.measures import row_of
from sterna.cli.simulate.simulate_command import configuration, jobs_of
from sterna.cli.simulate.simulate_options import add_simulate_options
from sterna.config import Soonest
from sterna.simulator.runs import Job, map_runs

QUICK_REQUESTS = 100
"""Of a run that only checks; its numbers have no meaning."""


def jobs(
    point: Point, names: Sequence[str], seeds: Sequence[int], *, is_quick: bool = False
) -> list[Job]:
    """The runs of a point: for each policy, and each bound that is simulated, one for each seed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_simulate_options(parser)
    args = parser.parse_args([*point.options, "--seed", *map(str, seeds)])
    policies = dict.fromkeys([STERNA, *(each for each in names if each not in DERIVED)])
    runs = jobs_of(args, {policy: configuration(args, policy) for policy in policies})
    if is_quick:
        runs = [
            replace(each, workload=replace(each.workload, num_requests=QUICK_REQUESTS))
            for each in runs
        ]
    found: list[Job] = []
    for name in names:
        of_policy = [each for each in runs if each.policy == (STERNA if name in DERIVED else name)]
        match name:
            case contenders.SOLO:
                pass
            case contenders.POOLED:
                found += map(pooled, of_policy)
            case contenders.FREE_MOVES:
                found += map(with_free_moves, of_policy)
            case contenders.TRUE_LENGTHS:
                found += map(with_true_lengths, of_policy)
            case contenders.ENGINE_COSTS:
                found += map(with_engine_costs, of_policy)
            case _:
                found += of_policy
    return found


def with_engine_costs(job: Job) -> Job:
    """The same requests under the same policy, whose dispatch has the costs of the engine."""
    config, rule = job.config, job.config.policy.dispatch
    assert isinstance(rule, Soonest)
    step, token_s = config.step_time, config.step_time.prefill_token_s
    rule = replace(
        rule,
        pair_cost=step.prefill_pair_s / token_s,
        request_cost=step.decode_request_s / token_s,
        kv_token_cost=step.decode_token_s / token_s,
        copy_token_cost=config.copy_time.block_s / config.engine.block_size / token_s,
    )
    policy = replace(config.policy, dispatch=rule)
    return Job(job.workload, replace(config, policy=policy), ENGINE_COSTS)


def rows_of(
    family: str,
    point: Point,
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    is_quick: bool = False,
    num_processes: int | None = None,
) -> list[Row]:
    """The rows of a point: of these policies and bounds, and all seeds."""
    planned = jobs(point, names, seeds, is_quick=is_quick)
    with simulation_progress() as progress:
        task = progress.add_task(f"{family}: {point.name}", total=len(planned))
        results = map_runs(
            planned,
            row_of,
            num_processes=num_processes,
            on_done=lambda _: progress.advance(task),
        )
    rows = [(job, job.policy, row) for job, (row,) in zip(planned, results, strict=True)]
    if SOLO in names:
        rows += [(job, SOLO, alone(job)) for job in jobs(point, [STERNA], seeds, is_quick=is_quick)]
    return [
        {"family": family, "point": point.name, "policy": name, "seed": job.workload.seed, **row}
        for job, name, row in rows
    ]
