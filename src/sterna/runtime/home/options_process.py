"""The process that reads the options of `sterna serve`, from both of its ends.

vLLM's parser and its checks need all of vLLM, half a gigabyte, which the process of `sterna serve`
would keep for the whole run. This one is a fork of the fork server where there is one, which has
imported vLLM, and ends when it has answered.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence

from ray import cloudpickle

from sterna.errors import ConfigurationError, SternaError
from sterna.runtime.fork_server.launcher import forked_command
from sterna.runtime.home.driver_messages import ServeOptions
from sterna.runtime.processes.log_lines import configure_logging


def ask(program: str, arguments: Sequence[str]) -> ServeOptions:
    """Have options read and checked in a process of their own.

    Args:
        program: the path of a Python program that calls `answer`.

    Raises:
        ConfigurationError: an option cannot work.
        SternaError: the process has ended without an answer.
    """
    with subprocess.Popen(
        [*forked_command(), program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A Ctrl-C in the terminal goes to the whole process group.
        start_new_session=True,
    ) as process:
        content, _ = process.communicate(json.dumps(list(arguments)).encode())
    try:
        outcome = pickle.loads(content)
    except (EOFError, pickle.UnpicklingError):
        raise SternaError("the process that reads the options has ended") from None
    if isinstance(outcome, ServeOptions):
        return outcome
    raise ConfigurationError(outcome)


def answer(read: Callable[[list[str]], ServeOptions]) -> None:
    """Answer `ask` in the process that it has started: arguments come on stdin, and the outcome
    goes to stdout."""
    # What a library prints must not be taken for the outcome.
    outcome_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    configure_logging("INFO")
    outcome: ServeOptions | str
    try:
        outcome = read(json.load(sys.stdin))
    except SternaError as error:
        outcome = str(error)
    with os.fdopen(outcome_fd, "wb") as stream:
        # Plain pickle refuses some values of a configuration.
        stream.write(cloudpickle.dumps(outcome))
