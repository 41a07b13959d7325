"""Reference pages that follow the code: options, HTTP routes, and messages between actors.

    python -m scripts.reference_pages

writes docs/reference/options.md, routes.md and messages.md, which `tests/test_reference_pages.py`
compares with the code. The metrics have a script of their own (`scripts.metric_files`).
"""

import argparse
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

import msgspec

from sterna.cli.main import command_parsers
from sterna.cli.options.option_tables import OptionTable, add_options
from sterna.cli.serve import serve_options
from sterna.cli.serve.cluster_address import TRANSPORT
from sterna.cli.serve.door_options import DOOR
from sterna.cli.serve.priority_options import PRIORITIES
from sterna.cli.serve.scaling_options import INSTANCES, SCALING
from sterna.frontend.http.routes import PREFIXES, ROUTES, Access, Route
from sterna.frontend.operators import admin_routes
from sterna.messages import actors, streams
from sterna.migration.messages import Message

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"

WRITTEN = "<!-- written by scripts/reference_pages.py -->"

GROUPS: Mapping[str, tuple[OptionTable, ...]] = {
    "Engine": (serve_options.ENGINE,),
    "Servers": (serve_options.SERVERS,),
    "Instances and auto-scaling": (INSTANCES, SCALING),
    "Scheduling": (serve_options.POLICY, serve_options.LLUMLET),
    "Priorities and keys": (PRIORITIES,),
    "Network": (TRANSPORT,),
    "Clients and limits": (DOOR,),
    "Failures": (serve_options.FAILURES,),
}
"""The options of `sterna serve`, by what they concern."""


def main() -> int:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        print((FOLDER / name).relative_to(ROOT))
    return 0


def pages() -> dict[str, str]:
    """Return the pages, by the names of their files."""
    return {"options.md": _options(), "routes.md": _routes(), "messages.md": _messages()}


# ------------------------------------------------------------------------------------- options


def _options() -> str:
    lines = [
        "# Options",
        "",
        WRITTEN,
        "",
        "`sterna serve` takes the options of `vllm serve` ([but",
        "these](../operations/run.md#start)), and those below. In a file for",
        "`--config` they have no dashes in front. `sterna COMMAND --help` shows the same, also of",
        "`profile`, which takes the options of `serve` as well, of `bench` and of `reproduce`.",
    ]
    for title, tables in GROUPS.items():
        lines += ["", f"## sterna serve: {title.lower()}", ""]
        rows = [row for table in tables for row in _rows(_parser_of(table))]
        lines += _table(("option", "meaning", "default"), rows)
    for name, parser in command_parsers().items():
        if rows := list(_rows(parser)):
            lines += ["", f"## sterna {name}", "", *_table(("option", "meaning", "default"), rows)]
    return "\n".join(lines) + "\n"


def _parser_of(table: OptionTable) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, table)
    return parser


def _rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    """One row for each argument: its name, its help and its default."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help is argparse.SUPPRESS:
            continue
        text, default = _text_and_default(formatter._expand_help(action) if action.help else "")
        metavar = formatter._metavar_formatter(action, action.dest.upper())(1)[0]
        if not action.option_strings:
            name = metavar
        elif action.nargs == 0:
            name = ", ".join(action.option_strings)
        else:
            name = f"{', '.join(action.option_strings)} {metavar}"
        yield f"`{name}`", text, default


def _text_and_default(text: str) -> tuple[str, str]:
    """The help, and the default that it ends with."""
    text = " ".join(text.split())
    before, found, after = text.rpartition("(default: ")
    if found and after.endswith(")"):
        return before.rstrip(), after[:-1]
    if text.startswith("default: "):
        return "", text.removeprefix("default: ")
    return text, ""


# -------------------------------------------------------------------------------------- routes


def _routes() -> str:
    rows = [(f"`{path}`", *_facts(route)) for path, route in ROUTES.items()]
    below = [(f"`{prefix}...`", *_facts(route)) for prefix, route in PREFIXES]
    titles = ("path", "access", "resumable", "at shutdown")
    admin = inspect.getdoc(admin_routes) or ""
    return "\n".join(
        [
            "# HTTP routes",
            "",
            WRITTEN,
            "",
            "vLLM's own routes, and Sterna's for operators. The access holds for servers with API",
            "keys; on others everything is open.",
            "",
            *_table(titles, rows),
            "",
            "Other paths, by their beginnings, of which the first that matches counts; what",
            "matches none is for operators:",
            "",
            *_table(titles, below),
            "",
            "## Routes of operators",
            "",
            "```text",
            *admin.splitlines()[2:],
            "```",
            "",
        ]
    )


def _facts(route: Route) -> tuple[str, str, str]:
    access = "operators' keys" if route.access is Access.OWN_CHECK else route.access.value
    return access, "yes" if route.is_resumable else "", route.at_shutdown.value


# ------------------------------------------------------------------------------------ messages


def _messages() -> str:
    # The second union contains the first.
    kinds = {
        "Of resumable streams": streams.StreamMessage,
        "Between actors": actors.WireMessage,
        "Of a migration": Message,
    }
    lines = [
        "# Messages",
        "",
        WRITTEN,
        "",
        "Every message is one way, a struct in msgpack over ZeroMQ; an answer is a message of its",
        "own ([architecture](../architecture.md#what-they-say-to-each-other)).",
    ]
    seen: set[type] = set()
    for title, union in kinds.items():
        lines += ["", f"## {title}"]
        for struct in _structs(union):
            if struct in seen:
                continue
            seen.add(struct)
            lines += ["", f"### {struct.__name__}", "", *_docstring(struct), ""]
            fields = ", ".join(f"`{each}`" for each in struct.__struct_fields__) or "none"
            lines.append(f"Fields: {fields}.")
    return "\n".join(lines) + "\n"


def _structs(union: object) -> Iterator[type[msgspec.Struct]]:
    for each in get_args(union):
        if get_args(each):
            yield from _structs(each)
        else:
            yield each


def _docstring(struct: type) -> list[str]:
    """The docstring, with its list of attributes as a list of Markdown."""
    lines: list[str] = []
    in_attributes = False
    for line in (inspect.getdoc(struct) or "").splitlines():
        if line == "Attributes:":
            in_attributes = True
        elif in_attributes and line.startswith("    ") and line[4] != " ":
            names, _, text = line.strip().partition(": ")
            lines.append(f"- {', '.join(f'`{each}`' for each in names.split(', '))}: {text}")
        elif in_attributes and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            in_attributes = False
            lines.append(line)
    return lines


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    def row(cells: Iterable[str]) -> str:
        return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"

    return [row(titles), row("---" for _ in titles), *map(row, rows)]


if __name__ == "__main__":
    sys.exit(main())
