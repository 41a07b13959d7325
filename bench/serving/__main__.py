"""`sterna bench serve`: sends a workload to a server and reports the latencies of its requests.

    sterna bench serve --url http://127.0.0.1:8000 --trace M-M --rate 2 --requests 300
    sterna bench serve --serve "--engine emulated --instances 4" --rate 2 --requests 300

Workloads, table and JSON are those of `sterna simulate`; docs/benchmarks.md lists the quantities
that a real run does not show.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common.command import end_like_ctrl_c, ended
from sterna.cli.options.option_values import positive, require_writable
from sterna.cli.simulate.simulate_options import PLOT_SUFFIXES
from sterna.cli.simulate.workload_options import (
    add_workload_options,
    report_long_requests,
    workload_of,
)
from sterna.errors import ConfigurationError

if TYPE_CHECKING:
    from bench.serving.report import Reported
    from bench.serving.session import ServedRun
    from bench.serving.target import Target
    from sterna.workload.trace import Trace

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workload, and print or write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    _check_files(options)
    with contextlib.ExitStack() as stack:
        url = options.url or DEFAULT_URL
        if options.serve is not None:
            if sys.stderr.isatty():
                print(f"sterna: starting sterna serve {options.serve}", file=sys.stderr)
            url = stack.enter_context(_server(options.serve, options.log))
        reported = _measured(options, url)
    _report(reported, options)


def _server(text: str, log: Path | None) -> "contextlib.AbstractContextManager[str]":
    from bench.serving.served import served

    try:
        return served(shlex.split(text), log=log)
    except ValueError as error:
        raise ConfigurationError(f"--serve cannot be read as options: {error}") from None


def _measured(options: argparse.Namespace, url: str) -> "Reported":
    from bench.serving.report import Reported
    from bench.serving.target import find_target
    from sterna.workload.catalog import build_trace

    target = asyncio.run(find_target(url, options.api_key, options.model))
    limits = [each for each in (options.max_total_tokens, target.max_model_len) if each is not None]
    limit = min(limits, default=None)
    workload = workload_of(options, options.seed, limit)
    if limit is not None:
        report_long_requests(workload, limit)
    trace = build_trace(workload)
    return Reported(_sent(options, target, trace), workload, options.label)


def _sent(options: argparse.Namespace, target: "Target", trace: "Trace") -> "ServedRun":
    from bench.serving.client import ClientConfig, PriorityField
    from bench.serving.report import progress
    from bench.serving.session import run_trace

    # The server may have been sent the same prompts in an earlier run.
    salt = secrets.token_hex(8)
    config = ClientConfig(
        options.seed, options.timeout, PriorityField(options.priority_field), cache_salt=salt
    )
    num_ended = 0
    with progress(len(trace)) as show:

        def on_ended() -> None:
            nonlocal num_ended
            num_ended += 1
            show(num_ended)

        try:
            return asyncio.run(
                run_trace(target, trace, config, interval_s=options.interval, on_ended=on_ended)
            )
        except KeyboardInterrupt:
            print(
                f"sterna: stopped when {num_ended:,} of {len(trace):,} requests had ended; "
                "nothing is reported",
                file=sys.stderr,
            )
            raise


def _report(reported: "Reported", options: argparse.Namespace) -> None:
    from bench.serving.report import draw_run, draw_samples, print_report, run_json, write_run

    if options.json:
        print(json.dumps(run_json(reported), allow_nan=False))
    else:
        print_report(reported)
    for option, path, write in (
        ("--output", options.output, write_run),
        ("--plot", options.plot, draw_run),
        ("--timeline", options.timeline, draw_samples),
    ):
        if path is None:
            continue
        try:
            write(reported, path)
        except OSError as error:
            raise ConfigurationError(
                f"{option} {path} cannot be written: {error.strerror}"
            ) from None


def _check_files(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before any run."""
    drawn = (("--plot", options.plot), ("--timeline", options.timeline))
    for option, path in drawn:
        if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
            raise ConfigurationError(
                f"{option} must end in {', '.join(PLOT_SUFFIXES)}, not {str(path)!r}"
            )
    for option, path in (*drawn, ("--output", options.output), ("--log", options.log)):
        if path is not None:
            require_writable(option, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench serve",
        description="Sends a workload to a server and reports the latencies of its requests, "
        "in the terms of `sterna simulate`.",
        epilog="docs/benchmarks.md explains what is measured.",
    )
    server = parser.add_argument_group("server")
    which = server.add_mutually_exclusive_group()
    which.add_argument("--url", help=f"URL of the server (default: {DEFAULT_URL})")
    which.add_argument(
        "--serve",
        metavar="OPTIONS",
        help="start `sterna serve OPTIONS` for this run, and end it afterwards",
    )
    server.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="the server's API key (default: $OPENAI_API_KEY)",
    )
    server.add_argument("--model", metavar="NAME", help="one of its models (default: the first)")
    add_workload_options(
        parser.add_argument_group("workload"),
        longest="the model's length on the server",
        has_several_seeds=False,
    )
    client = parser.add_argument_group("client")
    client.add_argument(
        "--priority-field",
        choices=("priority", "service-tier"),
        default="priority",
        help="field that carries the urgency of a request: vLLM's integer, or OpenAI's tier "
        "(default: %(default)s)",
    )
    client.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="SECONDS",
        help="time without any data after which a request fails (default: %(default)g)",
    )
    client.add_argument(
        "--interval",
        type=positive,
        default=0.5,
        metavar="SECONDS",
        help="time between two samples of the instances (default: %(default)g)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--label", metavar="TEXT", help="name of the server in reports")
    output.add_argument("--json", action="store_true", help="print only JSON")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw latencies and memory; .png, .svg or .pdf"
    )
    output.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="draw load, freeness, instances and migrations over time",
    )
    output.add_argument(
        "--log", type=Path, metavar="FILE", help="file for the output of the server of --serve"
    )
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="write every request and sample, as JSON"
    )
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
