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
import traceback
from typing import NoReturn

from sterna.runtime.noise import drop_noise

CHUNK_BYTES = 1 << 16
TIMEOUT_S = 5.0
"""Whoever asks has said everything by then."""


def main(address: str) -> None:
    """Import, then fork on demand until stdin is closed, which is the driver's end."""
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
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            connection, _ = server.accept()
            with connection:
                try:
                    _answer(connection, server)
                except (BrokenPipeError, ConnectionResetError):
                    # Who asked has ended meanwhile, as all of a run does that ends while it starts.
                    pass
                except (OSError, ValueError) as error:
                    # Who asked hears nothing, and starts an ordinary process.
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
            import sterna.frontend.server  # noqa: F401
    finally:
        del sys.modules["ray"]
    gc.freeze()


def _answer(connection: socket.socket, server: socket.socket) -> None:
    """Fork as the question says, and answer with the fork's process id."""
    connection.settimeout(TIMEOUT_S)
    content, descriptors, _, _ = socket.recv_fds(connection, CHUNK_BYTES, 3)
    try:
        while chunk := connection.recv(CHUNK_BYTES):
            content += chunk
        question = json.loads(content)
        process_id = os.fork()
        if process_id == 0:
            server.close()
            connection.close()
            _become(question, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    connection.sendall(str(process_id).encode())


def _become(question: dict[str, object], descriptors: list[int]) -> NoReturn:
    """Be the process that was asked for: its arguments, environment, folder and streams."""
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
    status = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        # Without room for what it has printed, it must end all the same: it is no fork server.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
