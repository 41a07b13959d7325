"""`sterna instances`, `requests`, `explain` and `migrate`: questions to a running server."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from typing import Any

from sterna.cli.operate.explain_text import explained, way
from sterna.cli.operate.top_view import Table, text_of
from sterna.errors import SternaError

DEFAULT_URL = "http://127.0.0.1:8000"
REQUEST_TIMEOUT_S = 60.0

UNTIL_UNDONE = "no instance is placed there until `sterna drain --undo --node {node}`"
"""End of a message about a node."""


class ServerError(SternaError):
    """The server could not be reached, or refused a command; the message is for the operator."""


class UnavailableError(ServerError):
    """The server could not be reached, or a part of it is being replaced: it may answer later."""


def add_commands(commands: Any) -> None:
    """Add the operators' commands to the parser's subcommands."""
    instances = commands.add_parser("instances", help="list the instances and their load")
    requests = commands.add_parser("requests", help="list the live requests")
    explain = commands.add_parser("explain", help="show what happened to a request, and why")
    migrate = commands.add_parser("migrate", help="move a request to another instance")
    for parser, run in (
        (instances, _instances),
        (requests, _requests),
        (explain, _explain),
        (migrate, _migrate),
    ):
        add_server_options(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=run)
    for parser in (explain, migrate):
        parser.add_argument("request", help="its id, as its client or `sterna requests` shows it")
    migrate.add_argument(
        "--to", required=True, metavar="INSTANCE", help="id of the instance that it moves to"
    )
    migrate.add_argument(
        "--mode",
        choices=("live", "stop_copy", "recompute"),
        default="live",
        help="how its KV cache is moved (default: %(default)s)",
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the server."""
    parser.add_argument(
        "--url",
        default=os.environ.get("STERNA_URL", DEFAULT_URL),
        help=f"URL of the server (default: $STERNA_URL, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("STERNA_API_KEY"),
        help="the server's API key (default: $STERNA_API_KEY)",
    )


def _instances(args: argparse.Namespace) -> int:
    rows = ask(args.url, "GET", "/admin/instances", args.api_key)
    columns = ("id", "node", "state", "used_tokens", "total_tokens", "freeness", "running")
    notes = ("note",) if any(row.get("note") for row in rows) else ()
    _print(rows, (*columns, "queuing", "migrating", *notes), args.json)
    if not args.json:
        for each in ask(args.url, "GET", "/admin/nodes", args.api_key):
            if each["drained"]:
                print(f"{each['node']} is drained: {UNTIL_UNDONE.format(**each)}")
    return 0


def _requests(args: argparse.Namespace) -> int:
    rows = ask(args.url, "GET", "/admin/requests", args.api_key)
    columns = ("id", "instance", "status", "class", "num_tokens", "num_output_tokens", "immovable")
    _print(rows, columns, args.json)
    return 0


def _explain(args: argparse.Namespace) -> int:
    query = urllib.parse.urlencode({"request": args.request})
    histories = ask(args.url, "GET", f"/admin/explain?{query}", args.api_key)
    print(json.dumps(histories) if args.json else "\n\n".join(map(explained, histories)))
    return 0


def _migrate(args: argparse.Namespace) -> int:
    body = {"request": args.request, "to": args.to, "mode": args.mode}
    outcome = ask(args.url, "POST", "/admin/migrate", args.api_key, body)
    if args.json:
        print(json.dumps(outcome))
        return 0
    for moved in outcome if isinstance(outcome, list) else [outcome]:
        print(moved_in_words(moved))
    return 0


def moved_in_words(moved: dict[str, Any]) -> str:
    """Return a line about one request that the server has moved."""
    return f"moved {moved['request']} {way(moved, moved['suspended_ms'] / 1e3)}"


def ask(url: str, method: str, path: str, api_key: str | None, body: Any = None) -> Any:
    """Send one request to the server's admin API; returns the decoded answer.

    Raises:
        UnavailableError: there is no server at `url`, or it cannot answer at this moment.
        ServerError: it refused.
    """
    if not url.startswith(("http://", "https://")):
        raise _not_there(url, "it begins with neither http:// nor https://")
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(
            url.rstrip("/") + path,
            method=method,
            headers=headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        with _opener(url).open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _not_there(url, getattr(error, "reason", error)) from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """A proxy (`http_proxy`) would take this machine's address for its own."""
    host = urllib.parse.urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _not_there(url: str, reason: object) -> UnavailableError:
    return UnavailableError(
        f"no Sterna server answers at {url} ({reason}); start one with `sterna serve`, or name it "
        f"with --url, as in --url {DEFAULT_URL}"
    )


def _refusal(url: str, error: urllib.error.HTTPError) -> ServerError:
    """The error for an answer with this status, in the server's own words where it has some."""
    status = f"{error.code} {error.reason}"
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        # Without these routes it is another server, or its address with a path, such as /v1.
        if error.code == HTTPStatus.NOT_FOUND:
            return _not_there(url, status)
        message = f"the server answered {status}"
    if error.code == HTTPStatus.UNAUTHORIZED:
        message += "; give it with --api-key, or as STERNA_API_KEY"
    is_unavailable = error.code == HTTPStatus.SERVICE_UNAVAILABLE
    return (UnavailableError if is_unavailable else ServerError)(message)


def _print(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    cells = tuple(tuple(_text(row.get(column)) for column in columns) for row in rows)
    print(text_of(Table(columns, cells)))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
