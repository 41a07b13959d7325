"""`sterna replay`: a recorded simulation in the dashboard's page, on a local web server.

The page reads the frames as it reads those of a running server, in the recording's time or faster.
Each time that the page is loaded, the recording starts from the beginning.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sterna.cli.options.option_values import count, positive
from sterna.dashboard import recording
from sterna.dashboard.cluster_frames import Frame
from sterna.dashboard.page import STREAM_TYPE, event, page
from sterna.errors import ConfigurationError

DEFAULT_PORT = 8080
MAX_PORT = 65_535

PAGE_PATHS = ("/", "/dashboard")
STREAM_PATH = "/admin/watch"


def add_commands(commands: Any) -> None:
    """Add `replay` to the parser's subcommands."""
    parser = commands.add_parser(
        "replay",
        help="show a recorded simulation in the dashboard's page",
        description="Shows a recording of `sterna simulate --record FILE` in a browser.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording")
    parser.add_argument(
        "--speed",
        type=positive,
        default=1.0,
        metavar="FACTOR",
        help="simulated seconds a second (default: %(default)g)",
    )
    parser.add_argument(
        "--from",
        type=float,
        default=0.0,
        metavar="SECONDS",
        dest="begin_s",
        help="simulated time at which it begins (default: %(default)g)",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default: %(default)s")
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="PORT", help="default: %(default)s"
    )
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    """Run `sterna replay` until it is interrupted.

    Raises:
        ConfigurationError: the file is no recording, or the port cannot be had.
    """
    # The whole file is read once, so that a damaged one is refused before a browser shows a part.
    times_s = [frame["t"] for frame in recording.read(args.file) if "t" in frame]
    if not times_s or args.begin_s > times_s[-1]:
        end = f"the recording ends at {times_s[-1]:g} s" if times_s else "the recording is empty"
        raise ConfigurationError(f"--from {args.begin_s:g}: {end}")
    handler = partial(_Handler, args.file, args.begin_s, args.speed)
    try:
        server = ThreadingHTTPServer((args.host, args.port), handler)
    except OSError as error:
        raise ConfigurationError(
            f"--host {args.host} --port {args.port}: {error.strerror}; choose another port"
        ) from None
    server.daemon_threads = True
    with server:
        host, port = server.server_address[:2]
        print(
            f"{args.file}: {len(times_s):,} frames at http://{host!s}:{port}/ ; Ctrl-C ends this",
            flush=True,
        )
        server.serve_forever()
    return 0


def _port(text: str) -> int:
    port = count(text)
    if port > MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_PORT}, not {text}")
    return port


def frames_of(path: Path, begin_s: float) -> Iterator[Frame]:
    """Yield the header of a recording, and its frames from this moment on.

    The names that earlier frames have given are in the header.

    Raises:
        ConfigurationError: see `recording.read`.
    """
    lines = recording.read(path)
    header = next(lines)
    names = list(header["names"])
    for frame in lines:
        if frame["t"] >= begin_s:
            yield {**header, "names": names}
            yield frame
            break
        names += frame["names"]
    yield from lines


class _Handler(BaseHTTPRequestHandler):
    """Answers the page and its stream."""

    def __init__(self, path: Path, begin_s: float, speed: float, *args: Any) -> None:
        self._recording = path
        self._begin_s = begin_s
        self._speed = speed
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        if path in PAGE_PATHS:
            self._send_page()
        elif path == STREAM_PATH:
            self._send_frames()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, *args: Any) -> None:
        """Requests are no news."""

    def _send_page(self) -> None:
        document = page()
        body = document.html.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in document.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _send_frames(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", STREAM_TYPE)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.close_connection = True
        begun_s = time.monotonic()
        first_s: float | None = None
        try:
            for frame in frames_of(self._recording, self._begin_s):
                if "t" in frame:
                    first_s = frame["t"] if first_s is None else first_s
                    due_s = begun_s + (frame["t"] - first_s) / self._speed
                    time.sleep(max(0.0, due_s - time.monotonic()))
                self.wfile.write(event(json.dumps(frame, separators=(",", ":")).encode()))
                self.wfile.flush()
            # The page keeps the last frame while its stream is open.
            while True:
                time.sleep(5.0)
                self.wfile.write(b": the recording has ended\n\n")
                self.wfile.flush()
        except OSError:
            # The browser has gone.
            return
