"""`sterna drain`, `start` and `restart`: changes to the instances of a running server, over HTTP.

The server carries a change out; the commands only watch it, and Ctrl-C ends only the command.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sterna.cli.operate.admin_commands import (
    UNTIL_UNDONE,
    ServerError,
    UnavailableError,
    add_server_options,
    ask,
)

POLL_INTERVAL_S = 0.5

NUM_LATE_POLLS = 4
"""The scheduler, which is polled, may learn of a drain a little later than the supervisor."""

NUM_IDLE_POLLS = 90
"""Polls in a row without an instance that comes or goes, after which no start is expected: longer
than the supervisor waits between two attempts."""

NUM_FAILED_POLLS = 60
"""Polls in a row without an answer, after which a command no longer watches: a front end or a
scheduler is replaced sooner."""

_STARTING = ("pending", "starting")
_UP = ("running", "warm")
_SETTLED = (*_UP, "pending")

Row = dict[str, Any]
Rows = list[Row]


def add_commands(commands: Any) -> None:
    """Add the commands to the parser's subcommands."""
    drain = commands.add_parser(
        "drain",
        help="empty an instance, or all of a node, without cutting a stream, then end them",
        description="Its requests move to others while they run; it ends when it is empty.",
    )
    drained = drain.add_mutually_exclusive_group(required=True)
    drained.add_argument(
        "instance", nargs="?", help="the instance's id, as `sterna instances` shows it"
    )
    drained.add_argument(
        "--node",
        metavar="ADDRESS",
        help="all instances of the node with this address, as `sterna instances` shows it; as many "
        "as before are wanted, and none is placed on the node until --undo",
    )
    drain.add_argument(
        "--undo",
        action="store_true",
        help="have it serve again, unless it is empty already; place instances on the node again",
    )
    start = commands.add_parser("start", help="start more instances")
    start.add_argument("num", nargs="?", type=int, default=1, metavar="N", help="default: 1")
    restart = commands.add_parser(
        "restart",
        help="replace every instance, one at a time, without cutting a stream",
        usage="%(prog)s [-h] --rolling [--no-surge] [--url URL] [--api-key API_KEY]\n"
        "                      [--no-wait] [-- OPTION ...]",
        description="Replaces every instance by one with the same options, and those that follow "
        "--, such as: sterna restart --rolling -- --max-num-seqs 64",
    )
    restart.add_argument(
        "--rolling",
        action="store_true",
        required=True,
        help="one instance at a time; no other way is supported",
    )
    restart.add_argument(
        "--no-surge",
        action="store_true",
        help="empty and end each instance before its successor starts: for machines without room "
        "for one more",
    )
    restart.add_argument("options", nargs="*", metavar="OPTION", help="options of vLLM")
    for parser, run in ((drain, _drain), (start, _start), (restart, _restart)):
        add_server_options(parser)
        parser.add_argument(
            "--no-wait", action="store_true", help="return when this has begun, without watching it"
        )
        parser.set_defaults(run=run)


def _drain(args: argparse.Namespace) -> int:
    if args.node is not None:
        return _drain_node(args)
    body = {"instance": args.instance, "undo": args.undo}
    ask(args.url, "POST", "/admin/drain", args.api_key, body)
    if args.undo:
        print(f"{args.instance} serves on")
        return 0
    if args.no_wait:
        print(f"{args.instance} is being drained; `sterna instances` shows how far it is")
        return 0
    wait_for_end(args.instance, _watch(args, lambda row: row["id"] == args.instance))
    print(f"{args.instance} has ended")
    return 0


def _drain_node(args: argparse.Namespace) -> int:
    body = {"node": args.node, "undo": args.undo}
    ask(args.url, "POST", "/admin/drain", args.api_key, body)
    if args.undo:
        print(f"{args.node} takes instances again")
        return 0
    if args.no_wait:
        print(f"{args.node} is being drained; `sterna instances` shows how far it is")
        return 0
    wait_for_empty_node(args.node, _watch(args, lambda row: row["node"] == args.node))
    print(f"{args.node} is empty: {UNTIL_UNDONE.format(node=args.node)}")
    return 0


def wait_for_empty_node(node: str, polls: Iterable[Rows]) -> None:
    """Return when no instance is on the node, which is being drained.

    Args:
        polls: the instances, as each poll lists them.

    Raises:
        ServerError: the drain was undone.
    """
    there = ([row for row in rows if row["node"] == node] for rows in polls if rows)
    # One that is to leave has a note, also while it is the last that takes requests.
    if not _ends(there, lambda row: bool(row["note"])):
        raise ServerError(f"{node} was told to have instances: the drain was undone")


def wait_for_end(instance_id: str, polls: Iterable[Rows]) -> None:
    """Return when the instance, which is being drained, is no longer listed.

    Args:
        polls: the instances, as each poll lists them.

    Raises:
        ServerError: the drain was undone.
    """
    there = ([row for row in rows if row["id"] == instance_id] for rows in polls if rows)
    if not _ends(there, lambda row: bool(row["state"] == "terminating")):
        raise ServerError(f"{instance_id} was told to serve on: the drain was undone")


def _ends(polls: Iterable[Rows], is_leaving: Callable[[Row], bool]) -> bool:
    """Wait until a poll has none of the instances that are being drained; returns False if they are
    to stay.

    Args:
        polls: these instances, as each poll lists them. One without any instance of the server is
            left out: a scheduler that has just replaced another one knows none yet.
    """
    has_begun = False
    for number, rows in enumerate(polls):
        if not rows:
            return True
        has_begun = has_begun or any(map(is_leaving, rows)) or number >= NUM_LATE_POLLS
        if has_begun and all(row["state"] == "running" and not is_leaving(row) for row in rows):
            return False
    return True


def _start(args: argparse.Namespace) -> int:
    rows = _instances(args)
    before = {row["id"] for row in rows if row["state"] == "running"}
    # Another order's, or the pool's. Which of those that come to serve are this order's is unknown,
    # also since the pool's may serve in their place.
    num_coming = sum(row["state"] in _STARTING for row in rows)
    ask(args.url, "POST", "/admin/start", args.api_key, {"instances": args.num})
    if args.no_wait:
        print("starting; `sterna instances` shows how far it is")
        return 0
    num_idle = 0
    for rows in _watch(args, lambda row: row["id"] not in before):
        new = [row for row in rows if row["id"] not in before]
        ready = [row["id"] for row in new if row["state"] == "running"]
        is_enough = len(ready) >= args.num
        coming = _STARTING if is_enough else (*_STARTING, "warm")
        num_idle = 0 if any(row["state"] in coming for row in new) else num_idle + 1
        is_over = num_idle == NUM_IDLE_POLLS
        if len(ready) >= args.num + num_coming or (is_enough and is_over):
            print(f"{', '.join(ready)} can serve")
            return 0
        if is_over:
            raise ServerError(
                f"{len(ready)} of {args.num} instances have started, and no other one starts: "
                "auto-scaling may have withdrawn the start; the server's log says why"
            )
    return 1


def _restart(args: argparse.Namespace) -> int:
    body = {"options": args.options, "surge": not args.no_surge}
    begun = ask(args.url, "POST", "/admin/restart", args.api_key, body)
    if args.no_wait:
        print("restarting; `sterna instances` shows how far it is")
        _print_for_next_start(args.options)
        return 0
    has_begun, num_before = False, 0
    for number, rows in enumerate(_watch(args, lambda row: row["state"] != "running")):
        is_new = [row["generation"] >= begun["generation"] for row in rows]
        has_begun = has_begun or any(is_new) or any(row["state"] == "terminating" for row in rows)
        # One that is given up at once is never seen to begin.
        has_begun = has_begun or number >= NUM_IDLE_POLLS
        old = [row for row, new in zip(rows, is_new, strict=True) if not new]
        num_before = max(num_before, sum(row["state"] in _UP for row in old))
        is_still = all(row["state"] in _SETTLED for row in rows)
        up = [row["id"] for row in rows if row["state"] in _UP]
        # Where not all that are wanted have a place, the others wait for one as they did before.
        is_enough = len(up) >= max(1, min(num_before, len(rows)))
        if all(is_new) and is_still and is_enough:
            print(f"restarted: {', '.join(up)} serve")
            _print_for_next_start(args.options)
            return 0
        if rows and has_begun and not any(is_new) and is_still:
            raise ServerError(
                "the restart was given up, and the instances are as they were: a new one did not "
                "start; the server's log says why"
            )
    return 1


def _print_for_next_start(options: Sequence[str]) -> None:
    """Only the running server knows the options of a restart."""
    if options:
        print(f"give them to the next `sterna serve` too: {shlex.join(options)}")


def _watch(args: argparse.Namespace, is_shown: Callable[[Row], bool]) -> Iterator[Rows]:
    """Poll the instances without end; print the changes of those for which `is_shown` holds.

    Raises:
        ServerError: the server refuses, or has not answered for long.
    """
    try:
        yield from _polls(args, is_shown)
    except KeyboardInterrupt:
        print("what was ordered goes on; `sterna instances` shows how far it is", file=sys.stderr)
        raise


def _polls(args: argparse.Namespace, is_shown: Callable[[Row], bool]) -> Iterator[Rows]:
    shown: dict[str, str] = {}
    num_failed = 0
    while True:
        try:
            rows = _instances(args)
        except UnavailableError as error:
            num_failed += 1
            if num_failed == NUM_FAILED_POLLS:
                raise ServerError(
                    f"{error}. What was ordered goes on if the server does; `sterna instances` "
                    "shows how far it is"
                ) from error
            time.sleep(POLL_INTERVAL_S)
            continue
        num_failed = 0
        for line in changes(shown, rows, is_shown):
            print(line, file=sys.stderr, flush=True)
        yield rows
        time.sleep(POLL_INTERVAL_S)


def changes(shown: dict[str, str], rows: Rows, is_shown: Callable[[Row], bool]) -> list[str]:
    """Return the lines that are new since the last call.

    Args:
        shown: the last line of each instance; is updated.
    """
    lines = []
    for row in filter(is_shown, rows):
        note = "" if row["note"] is None else f": {row['note']}"
        line = f"{row['id']} {row['state']}{note}"
        if shown.get(row["id"]) != line:
            shown[row["id"]] = line
            lines.append(line)
    there = {row["id"] for row in rows}
    # A scheduler that has just replaced another one knows no instance yet.
    for instance_id in [each for each in shown if rows and each not in there]:
        if shown.pop(instance_id).startswith((f"{instance_id} starting", f"{instance_id} pending")):
            lines.append(f"{instance_id} did not come up; the server's log says why")
    return lines


def _instances(args: argparse.Namespace) -> Rows:
    rows: Rows = ask(args.url, "GET", "/admin/instances", args.api_key)
    return rows
