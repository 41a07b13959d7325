"""The fork server: a process that has imported vLLM, and forks itself on request.

Importing vLLM takes longer than the rest of an instance's start, and every process that imports it
has its own copy of the same half gigabyte. This process imports it once and changes nothing after
that. A request over its socket makes a fork, which becomes a worker of Ray (`forked_worker`).

A fork has the memory of its parent and one thread. That is safe here because nothing has begun to
run: no asyncio loop, no thread of ours, no engine, no device. Ray is not imported: its client
starts threads at import, and a fork would have the locks of these threads but not the threads.
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

from sterna.errors import SternaError
from sterna.own_log import LogThrottle
from sterna.runtime.fork_server.forked_worker import leave_removed_folder
from sterna.runtime.processes.log_lines import drop_noise

CHUNK_BYTES = 1 << 16
TIMEOUT_S = 5.0
"""A client has sent its whole request by then."""

ACCEPT_PAUSE_S = 0.1
"""Time between two attempts to accept a connection while no descriptor is left."""

NUM_STREAMS = 3
"""A fork gets its stdin, stdout and stderr from the client."""


def main(address: str) -> None:
    """Import, then fork on request until stdin is closed, which is the end of `sterna serve`."""
    leave_removed_folder()
    # A Ctrl-C in the terminal is for `sterna serve`, which ends the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel reaps the forks: Ray finds out by itself when one has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        # An early client waits for the imports: its own would take as long.
        server.bind(address)
        server.listen()
        try:
            _import_all()
        except SternaError:
            # The process that reads the options fails of the same, and reports it.
            sys.exit(1)
        selector.register(server, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        throttle = LogThrottle()
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            try:
                connection, _ = server.accept()
            except OSError as error:
                # The client waits until then.
                if throttle.is_due():
                    _log(error)
                time.sleep(ACCEPT_PAUSE_S)
                continue
            with connection:
                try:
                    _answer(connection, server)
                except (BrokenPipeError, ConnectionResetError):
                    # The client has ended, as when a run ends while it starts.
                    pass
                except (OSError, ValueError) as error:
                    # The client gets no answer, and becomes an ordinary process.
                    _log(error)


def _log(error: Exception) -> None:
    with contextlib.suppress(OSError):
        print(f"fork server: {error}", file=sys.stderr, flush=True)


def _import_all() -> None:
    drop_noise()
    # vLLM does without Ray if the import fails.
    sys.modules["ray"] = None  # type: ignore[assignment]
    try:
        from sterna.engine.vllm.guard import preload, vllm_imports

        with vllm_imports():
            preload()
            import sterna.frontend.vllm_server.server  # noqa: F401
    finally:
        del sys.modules["ray"]
    gc.freeze()


def _answer(connection: socket.socket, server: socket.socket) -> None:
    """Read one request and fork; the fork answers.

    Raises:
        OSError: no fork can be made, or the client has ended.
        ValueError: the request is invalid or incomplete.
    """
    connection.settimeout(TIMEOUT_S)
    content, descriptors, _, _ = socket.recv_fds(connection, CHUNK_BYTES, NUM_STREAMS)
    try:
        if len(descriptors) != NUM_STREAMS:
            # The kernel leaves out descriptors for which there is no room.
            raise ValueError(f"{len(descriptors)} of {NUM_STREAMS} descriptors came")
        while chunk := connection.recv(CHUNK_BYTES):
            content += chunk
        request = json.loads(content)
        if os.fork() == 0:
            _run(request, descriptors, connection, server)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _run(
    request: dict[str, object],
    descriptors: list[int],
    connection: socket.socket,
    server: socket.socket,
) -> NoReturn:
    """Become the requested process, answer with its process id, and end with it."""
    status = 1
    try:
        server.close()
        _become(request, descriptors)
        # Not earlier: a client without an answer becomes an ordinary process.
        with connection:
            try:
                connection.sendall(str(os.getpid()).encode())
            except OSError:
                # The client has ended.
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
                # The disk may have no room for the output.
                with contextlib.suppress(OSError):
                    stream.flush()
        finally:
            os._exit(status)


def _become(request: dict[str, object], descriptors: list[int]) -> None:
    """Take the arguments, environment, folder and streams of the request."""
    # Ray ends a worker with its process group, which must not be that of all forks.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(request["folder"]))
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1])
