"""`sterna top`: the cluster at a glance, refreshed; with keys to move requests and drain instances.

On a terminal it fills the screen (`top_app`); otherwise it prints one snapshot and ends.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sterna.cli.operate.admin_commands import (
    ServerError,
    add_server_options,
    ask,
    moved_in_words,
)
from sterna.cli.operate.top_view import Snapshot, plain
from sterna.cli.options.option_values import count, positive

RECENT_S = 30.0
"""Time of which decisions and latencies are shown."""

ANSWER_TIMEOUT_S = 2.0
"""Time that an instance has to list its requests; those of others are not shown."""

NOTHING_RECENT: dict[str, Any] = {"decisions": [], "ttft_s": [], "tpot_s": [], "waiting": 0}


class Server:
    """A running server, over its admin API. Every method raises `ServerError` if it cannot be
    reached, or refuses."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._api_key = api_key

    def snapshot(self) -> Snapshot:
        """Ask for all that is shown; what is not answered is empty, unless nothing is."""
        questions = {
            "/admin/instances": [],
            f"/admin/requests?timeout_s={ANSWER_TIMEOUT_S:g}": [],
            f"/admin/recent?last_s={RECENT_S:g}": NOTHING_RECENT,
        }
        answers: list[Any] = []
        errors: list[ServerError] = []
        with ThreadPoolExecutor(len(questions)) as pool:
            asked = [pool.submit(self._get, path) for path in questions]
            for future, otherwise in zip(asked, questions.values(), strict=True):
                try:
                    answers.append(future.result())
                except ServerError as error:
                    answers.append(otherwise)
                    errors.append(error)
        if len(errors) == len(questions):
            raise errors[0]
        instances, requests, recent = answers
        return Snapshot(instances, requests, recent, tuple(map(str, errors)))

    def migrate(self, request_id: str, destination: str) -> str:
        """Move the request; returns what has happened."""
        body = {"request": request_id, "to": destination}
        return moved_in_words(ask(self.url, "POST", "/admin/migrate", self._api_key, body))

    def drain(self, instance_id: str, *, is_undo: bool) -> str:
        """Begin to empty the instance, or have it serve on; returns what has happened."""
        body = {"instance": instance_id, "undo": is_undo}
        ask(self.url, "POST", "/admin/drain", self._api_key, body)
        return f"{instance_id} serves on" if is_undo else f"{instance_id} is being drained"

    def _get(self, path: str) -> Any:
        return ask(self.url, "GET", path, self._api_key)


def add_commands(commands: Any) -> None:
    """Add `top` to the parser's subcommands."""
    parser = commands.add_parser(
        "top",
        help="watch instances, requests and decisions, full-screen",
        description="Watch instances, requests and recent decisions. On a terminal: m moves the "
        "chosen request, d drains the chosen instance, u undoes that, p pauses, q ends. Without a "
        "terminal, one snapshot is printed.",
    )
    add_server_options(parser)
    parser.add_argument(
        "--interval",
        type=positive,
        default=1.0,
        metavar="SECONDS",
        help="time between two refreshes (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    parser.add_argument(
        "--rows",
        type=count,
        default=20,
        metavar="N",
        help="rows of each table of a printed snapshot (default: %(default)s)",
    )
    parser.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    server = Server(args.url, args.api_key)
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(plain(server.snapshot(), args.rows))
        return 0
    # A server that is not there is an error now, and a line on the screen later.
    server.snapshot()
    # Its imports take long.
    from sterna.cli.operate.top_app import TopApp

    TopApp(server, args.interval).run()
    return 0
