"""A server of the benchmark itself: started, awaited, and ended in every case."""

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.serving.ports import free_port
from sterna.errors import ConfigurationError

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.2
"""Interval of the checks whether the server is ready."""

PORT_OPTION = "--port"


@contextlib.contextmanager
def served(
    options: Sequence[str],
    *,
    log: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    within: Sequence[str] = (),
    program: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Run `sterna serve` with these options for as long as the context lasts; yields its URL.

    It gets a free port unless the options name one.

    Args:
        log: the file for its output; by default only the reason of a failed start is reported.
        within: a command that becomes the one that follows it, such as `env`.
        program: in place of `sterna serve`: a server with `--port` and `/health`.
        environment: environment variables besides those of this process.
        tls: how a client checks the certificate that the options name; None without one.

    Raises:
        ConfigurationError: the server ended before it was ready, or took longer than `timeout_s`.
    """
    port = _port(options)
    if program is None:
        program = (str(Path(sys.executable).with_name("sterna")), "serve")
    command = [*within, *program, *options]
    if PORT_OPTION not in _names(options):
        command += [PORT_OPTION, str(port)]
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    with tempfile.TemporaryFile() if log is None else log.open("w+b") as printed:
        # A session of its own: Ctrl-C reaches only this program, which then ends the server.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            _until_ready(process, url, time.monotonic() + timeout_s, printed.fileno(), tls)
            yield url
        finally:
            end_group(process)


def _names(options: Sequence[str]) -> set[str]:
    return {each.partition("=")[0] for each in options}


def _port(options: Sequence[str]) -> int:
    """The port that the options name, or a free one."""
    for index, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name != PORT_OPTION:
            continue
        text = value if equals else "".join(options[index + 1 : index + 2])
        if not text.isdecimal():
            raise ConfigurationError(f"--serve: {PORT_OPTION} needs a number, not {text!r}")
        return int(text)
    return free_port()


def _until_ready(
    process: subprocess.Popen[bytes],
    url: str,
    deadline_s: float,
    log: int,
    tls: ssl.SSLContext | None,
) -> None:
    while True:
        if process.poll() is not None:
            raise ConfigurationError(f"the server ended: {_last_line(log)}")
        if time.monotonic() > deadline_s:
            raise ConfigurationError(f"the server was not ready in time: {_last_line(log)}")
        # Another program on the port may answer anything; the server then ends.
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{url}/health", timeout=5.0, context=tls),
        ):
            return
        time.sleep(POLL_INTERVAL_S)


def _last_line(log: int) -> str:
    """The last error that the server printed, else its last line."""
    size = os.fstat(log).st_size
    text = os.pread(log, size, 0).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line]
    words = (errors or lines or ["without any output"])[-1]
    return words.removeprefix("sterna: error: ")


def end_group(process: subprocess.Popen[bytes], timeout_s: float = END_TIMEOUT_S) -> None:
    """Let a process end by itself, else kill it, and kill what it leaves of its process group: a
    `vllm serve` that is still starting leaves its workers.

    Args:
        process: the first of its group.
    """
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
