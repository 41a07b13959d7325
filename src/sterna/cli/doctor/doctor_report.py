"""Report of `sterna doctor`, and the repair of an environment that pip has made."""

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence

from sterna.cli.doctor.findings import Finding, Level, Wanted, findings
from sterna.cli.doctor.machine import look_at_machine, look_at_model
from sterna.demo_model.small_model import find_uv
from sterna.engine.vllm.guard import define_operators, wrong_companions
from sterna.errors import ConfigurationError


def run(args: argparse.Namespace) -> int:
    """Run `sterna doctor`; returns the exit status.

    Raises:
        ConfigurationError: the environment cannot be repaired.
    """
    if args.repair:
        for line in repair():
            print(line, file=sys.stderr)
    wanted = Wanted(
        model=None if args.model is None else look_at_model(args.model),
        num_instances=args.instances,
        gpus_per_instance=args.gpus_per_instance,
        port=args.port,
    )
    found = findings(look_at_machine(args.host, args.port), wanted)
    if args.json:
        rows = [{**dataclasses.asdict(each), "level": each.level.value} for each in found]
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(report(found)))
    return int(any(each.level is Level.ERROR for each in found))


def report(found: Sequence[Finding]) -> list[str]:
    """Return the lines of the report: one for each finding, one for its advice, and the result."""
    lines = []
    for each in found:
        lines.append(f"{each.level.value:8} {each.subject:14} {each.fact}")
        if each.advice:
            lines.append(f"{'':23} -> {each.advice}")
    count = {level: sum(each.level is level for each in found) for level in Level}
    if count[Level.ERROR]:
        lines.append(f"{count[Level.ERROR]} of these keep `sterna serve` from working")
    elif count[Level.WARNING]:
        lines.append(f"`sterna serve` works here; warnings: {count[Level.WARNING]}")
    else:
        lines.append("`sterna serve` works here")
    return lines


def repair() -> list[str]:
    """Make vLLM's CPU build importable in this environment; returns what was done, in words.

    Raises:
        ConfigurationError: no package client is there, or it failed.
    """
    before = wrong_companions()
    define_operators()
    left = wrong_companions()
    done = [f"{name}: made importable" for name in before if name not in left]
    if left:
        _uninstall(left)
        done += [f"{name}: removed" for name in left]
    return done or ["nothing to repair in this environment"]


def _uninstall(names: Sequence[str]) -> None:
    if (uv := find_uv()) is not None:
        command = [uv, "pip", "uninstall", "--python", sys.executable, *names]
    elif importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "uninstall", "--yes", *names]
    else:
        raise ConfigurationError(f"neither uv nor pip is here: remove {' '.join(names)} yourself")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigurationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
