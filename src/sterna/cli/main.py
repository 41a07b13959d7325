"""The `sterna` command: one module a subcommand, imported only when it is used."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from sterna.cli import bench, join
from sterna.cli.doctor import doctor_command
from sterna.cli.operate import admin_commands, fleet_commands, top_command
from sterna.cli.simulate import replay_command, simulate_command
from sterna.errors import SternaError

READER_GONE = 128 + 13
"""Exit status when the reader of the output has ended, such as `head`: that of SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    An error on which the user can act is printed in one line; any other error is a bug and keeps
    its traceback.
    """
    status = _status(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        _exit_now(status)
    return status


def _status(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["serve"]:
            # vLLM's own parser reads the options, so that its help and errors stay right.
            from sterna.cli.serve.serve_command import serve

            return serve(arguments)
        if arguments[:1] == ["profile"]:
            # It has the options of `serve`, and some more.
            from sterna.cli.profile import profile

            return profile(arguments[1:])
        if arguments[:1] == ["reproduce"]:
            # The evaluation has a parser of its own, outside the installed package.
            from sterna.cli.checkout import reproduce

            return reproduce(arguments[1:])
        args, unknown = _parser().parse_known_args(arguments)
        if unknown:
            # With the usage of the command: argparse would show that of `sterna`.
            command_parsers()[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = args.run(args)
    except SternaError as error:
        print(f"sterna: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return READER_GONE
    return status


def _exit_now(status: int) -> NoReturn:
    """End the process at once: the interpreter would need seconds to destroy vLLM's modules, while
    the terminal waits."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        status = READER_GONE
    os._exit(status)


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands that have one here, by name."""
    parser = _parser()
    (commands,) = (each for each in parser._actions if isinstance(each.choices, dict))
    assert isinstance(commands.choices, dict), "the subcommands"
    return dict(commands.choices)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna",
        description="Serve one LLM on many engine instances; running requests move live.",
    )
    parser.add_argument("--version", action="version", version=f"sterna {version('sterna')}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    # Listed for the help only; `main` hands both to vLLM's parser.
    commands.add_parser("serve", help="serve a model on several vLLM instances")
    commands.add_parser("profile", help="measure an engine's steps and propose its target load")
    commands.add_parser(
        "reproduce", help="rerun the paper's evaluation and compare it with the paper's points"
    )
    admin_commands.add_commands(commands)
    fleet_commands.add_commands(commands)
    top_command.add_commands(commands)
    join.add_commands(commands)
    bench.add_commands(commands)
    doctor_command.add_commands(commands)
    simulate_command.add_commands(commands)
    replay_command.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
