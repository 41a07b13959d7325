"""`sterna bench NAME`: runs a benchmark of the source checkout."""

import argparse
import os
from typing import Any

from sterna.cli.checkout import become
from sterna.runtime.home.ray_environment import protect_ray

BENCHMARKS = {
    "serve": (
        "bench.serving",
        "latencies of a workload on a running server, or on one started for it",
    ),
    "migration": (
        "bench.migration",
        "downtime and cost of migrations between two real instances",
    ),
    "kinds": (
        "bench.kinds",
        "each kind of model on two real instances: moves, their tokens and their cost",
    ),
    "priorities": (
        "bench.priorities",
        "gain of urgent requests from priorities, and cost for the others, on real instances",
    ),
    "paced": (
        "bench.paced",
        "policies on real engines whose steps take the time of measured hardware",
    ),
    "overhead": (
        "bench.plain_vllm.overhead",
        "one instance of Sterna's beside plain `vllm serve`",
    ),
    "start": (
        "bench.plain_vllm.start",
        "from the command to the first token, beside plain `vllm serve`",
    ),
    "memory": (
        "bench.processes.memory",
        "memory of idle servers, of further instances and of streams, beside vLLM's",
    ),
    "front-end": (
        "bench.processes.front_end",
        "processor time of the HTTP process for a request and a token, beside vLLM's",
    ),
    "explain": (
        "bench.processes.explain",
        "the share of the processor time that explanations of decisions take",
    ),
    "dispatch": (
        "bench.scheduling",
        "the scheduler's decisions, load reports and rounds, with 16 to 1,024 instances",
    ),
    "stalls": (
        "bench.scheduling.stalls",
        "the time between two steps of busy engines, with emulated and with simulated instances",
    ),
    "data-parallel": (
        "bench.plain_vllm.data_parallel",
        "replicas of Sterna's beside those of vLLM's own data parallelism",
    ),
    "data-plane": (
        "bench.migration.data_plane",
        "copies of the KV cache between two processes, beside the wires alone",
    ),
    "autoscaling": (
        "bench.autoscaling",
        "a load step up and down on one to three real instances",
    ),
    "chaos": (
        "bench.chaos",
        "streams while processes of the server are killed, stopped and cut off",
    ),
    "draining": (
        "bench.autoscaling.draining",
        "streams over a drain and a rolling restart, compared token by token",
    ),
    "instance-start": (
        "bench.autoscaling.instance_start",
        "the start of one more instance: as a new process, as a fork, from the warm pool",
    ),
    "fidelity": (
        "bench.simulation.fidelity",
        "accuracy of simulations against the points of the paper's Figure 11",
    ),
    "simulator": ("bench.simulation.simulator", "speed of simulations"),
}
"""The benchmarks by name: the module or package of the checkout, and its subject."""


def add_commands(commands: Any) -> None:
    """Add `bench` to the parser's subcommands."""
    bench = commands.add_parser(
        "bench",
        help="run a benchmark, and write bench/results",
        epilog="; ".join(f"{name}: {what}" for name, (_, what) in BENCHMARKS.items()),
    )
    bench.add_argument("name", choices=list(BENCHMARKS), metavar="NAME", help="the benchmark")
    bench.add_argument(
        "options", nargs=argparse.REMAINDER, help="its own options; --help lists them"
    )
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    """Become the benchmark's process.

    Raises:
        ConfigurationError: this is no source checkout.
    """
    protect_ray(os.environ)
    module, _ = BENCHMARKS[args.name]
    become(module, args.options)
