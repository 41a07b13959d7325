"""vLLM's own command line for `serve`, for Sterna to add its options to."""

import argparse

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sterna.errors import ConfigurationError


def make_serve_parser() -> tuple[FlexibleArgumentParser, argparse.ArgumentParser]:
    """Return a parser that reads `serve [MODEL] ...`, and its part for `serve`."""
    parser = FlexibleArgumentParser(prog="sterna")
    commands = parser.add_subparsers(required=True, dest="subparser")
    serve_parser = ServeSubcommand().subparser_init(commands)
    serve_parser.usage = "sterna serve [MODEL] [options]"
    serve_parser.description = (
        "Serve a model on several vLLM instances behind one OpenAI-compatible API. "
        "Every option of `vllm serve` works; --help=Sterna lists what is added."
    )
    serve_parser.set_defaults(host="127.0.0.1")
    return parser, serve_parser


def validate(args: argparse.Namespace) -> None:
    """Run vLLM's checks of parsed options.

    Raises:
        ConfigurationError: an option cannot work; the message is vLLM's.
    """
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def default_model() -> str:
    """Return the model that vLLM takes when none is named."""
    return str(EngineArgs.model)


def is_cpu_platform() -> bool:
    """Whether vLLM runs on the CPU on this machine."""
    return bool(current_platform.is_cpu())
