"""Starts processes that have vLLM imported already: forks of one that imported it once.

To import vLLM takes longer than all the rest of starting an instance, and every process that does
it has its own copy of the same half gigabyte. This one imports it once, stays as it is, and is
asked over a socket for forks, each of which becomes a worker of Ray (`forked`).

A fork has the memory of its parent and one thread. That is safe here because nothing has begun to
run: no asyncio loop, no thread of ours, no engine, no device. Ray itself is kept out: its client
begins threads at its import, and a fork would have their locks and not them.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

from sterna.log_throttle import LogThrottle
from sterna.runtime.fork_server.forked_worker import leave_removed_folder
from sterna.runtime.processes.log_filters import drop_noise

CHUNK_BYTES = 1 << 16
TIMEOUT_S = 5.0
"""Whoever asks has said everything by then."""

ACCEPT_PAUSE_S = 0.1
"""Between two attempts to hear who asks, where no descriptor is left for that."""

NUM_STREAMS = 3
"""A fork gets its stdin, stdout and stderr from whoever asks for it."""


def main(address: str) -> None:
    """Import, then fork on demand until stdin is closed, which is the driver's end."""
    leave_removed_folder()
    # A Ctrl-C in the terminal is for the driver, which ends the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody waits for the forks: Ray finds out by itself when one has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        # Who asks earlier waits for the imports: to do them oneself would take as long.
        server.bind(address)
        server.listen()
        _import_all()
        selector.register(server, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        complaint = LogThrottle()
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            try:
                connection, _ = server.accept()
            except OSError as error:
                # Who asks waits so long.
                if complaint.is_due():
                    _say(error)
                time.sleep(ACCEPT_PAUSE_S)
                continue
            with connection:
                try:
                    _answer(connection, server)
                except (BrokenPipeError, ConnectionResetError):
                    # Who asked has ended meanwhile, as all of a run does that ends while it starts.
                    pass
                except (OSError, ValueError) as error:
                    # Who asked hears nothing, and starts an ordinary process.
                    _say(error)


def _say(error: Exception) -> None:
    with contextlib.suppress(OSError):
        print(f"fork server: {error}", file=sys.stderr, flush=True)


def _import_all() -> None:
    drop_noise()
    # For vLLM, which can do without, there is no Ray.
    sys.modules["ray"] = None  # type: ignore[assignment]
    try:
        from sterna.engine.vllm.guard import vllm_imports

        with vllm_imports():
            import sterna.engine.vllm.preload
            import sterna.frontend.vllm_server.server  # noqa: F401
    finally:
        del sys.modules["ray"]
    gc.freeze()


def _answer(connection: socket.socket, server: socket.socket) -> None:
    """Fork as the question says; the fork answers.

    Raises:
        OSError: no fork can be made, or who asked has ended.
        ValueError: the question makes no sense, or has not come as a whole.
    """
    connection.settimeout(TIMEOUT_S)
    content, descriptors, _, _ = socket.recv_fds(connection, CHUNK_BYTES, NUM_STREAMS)
    try:
        if len(descriptors) != NUM_STREAMS:
            # The kernel leaves out those for which there is no room.
            raise ValueError(f"{len(descriptors)} of {NUM_STREAMS} descriptors came")
        while chunk := connection.recv(CHUNK_BYTES):
            content += chunk
        question = json.loads(content)
        if os.fork() == 0:
            _run(question, descriptors, connection, server)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _run(
    question: dict[str, object],
    descriptors: list[int],
    connection: socket.socket,
    server: socket.socket,
) -> NoReturn:
    """Be the process that was asked for, say its process id, and end with it."""
    status = 1
    try:
        server.close()
        _become(question, descriptors)
        # Not earlier: who hears nothing starts an ordinary process.
        with connection:
            try:
                connection.sendall(str(os.getpid()).encode())
            except OSError:
                # Who asked has ended meanwhile.
                sys.exit(status)
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        # Whatever happens, it must not go on as a second fork server.
        try:
            for stream in (sys.stdout, sys.stderr):
                # There may be no room for what it has printed.
                with contextlib.suppress(OSError):
                    stream.flush()
        finally:
            os._exit(status)


def _become(question: dict[str, object], descriptors: list[int]) -> None:
    """Take what was asked for: its arguments, environment, folder and streams."""
    # Ray ends a worker with its whole group, which must not be that of all forks.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    environment, arguments = question["environment"], question["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(question["folder"]))
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1])
