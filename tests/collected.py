"""Selection of tests by a command of the documentation.

Read from the source, for to collect them would import everything that they use. Of a parameter the
id counts where it is text or made by a function; other ids are the names of nothing.
"""

import argparse
import ast
import importlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# What `-k` and `-m` mean is pytest's to say; it has no public name for it.
from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
OPTIONS: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"][
    "ini_options"
]["addopts"]
"""Those of every command, before its own."""


@dataclass(frozen=True, slots=True)
class Function:
    """A test function, or the state machine of a class.

    Attributes:
        node_id: as pytest prints it, without parameters.
        names: what `-k` looks into.
        marks: what `-m` does; `-k` looks into these as well.
    """

    node_id: str
    names: tuple[str, ...]
    marks: frozenset[str]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a command asks pytest for.

    Attributes:
        paths: files and folders, from the root.
    """

    paths: tuple[str, ...]
    keywords: str
    marks: str

    def functions(self) -> list[Function]:
        """Those that are taken, of whose parameters perhaps only some are.

        Raises:
            FileNotFoundError: there is no such file or folder.
        """
        files = [file for path in self.paths for file in _files(path)]
        fitting = [each for file in files for each in functions_of(file) if self._fits(each)]
        taken = [each for each in fitting if self._names(each.names, each.marks)]
        if not taken and all(path.endswith(".py") for path in self.paths):
            # A parameter is looked at only here: its module has to be imported for that.
            taken = [each for each in fitting if self._names_parameters(each)]
        return taken

    def _fits(self, function: Function) -> bool:
        return _holds(self.marks, lambda mark: mark in function.marks)

    def _names(self, names: Sequence[str], marks: frozenset[str]) -> bool:
        known = [each.lower() for each in (*names, *marks)]
        return _holds(self.keywords, lambda word: any(word.lower() in name for name in known))

    def _names_parameters(self, function: Function) -> bool:
        return any(
            self._names((*function.names, each), function.marks) for each in _parameters(function)
        )


def selection_of(command: str) -> Selection:
    """What a command asks for: `pytest ...`, or `make TARGET ARGS="..."` where that is pytest.

    Raises:
        ValueError: it is neither.
    """
    program, *words = shlex.split(command)
    if program == "make":
        return _selection(_recipe(words[0], dict(each.split("=", 1) for each in words[1:])))
    if program != "pytest":
        raise ValueError(f"this runs no tests: {command}")
    return _selection(words)


@cache
def functions_of(file: Path) -> tuple[Function, ...]:
    """The tests of a file, in its order."""
    tree = ast.parse(file.read_text("utf-8"))
    relative = file.relative_to(ROOT)
    marks = {
        mark
        for statement in tree.body
        if isinstance(statement, ast.Assign) and _target(statement) == "pytestmark"
        for mark in _marks(statement.value)
    }
    found = []
    for *classes, name, own in _tests(tree.body):
        all_marks = marks | own
        # As tests/serve/conftest.py has it.
        if relative.is_relative_to("tests/serve") and "ray" in all_marks:
            all_marks |= {"slow"}
        node_id = "::".join((relative.as_posix(), *classes, name))
        found.append(Function(node_id, (*relative.parts, *classes, name), frozenset(all_marks)))
    return tuple(found)


# ------------------------------------------------------------------------------------ commands


def _selection(words: Sequence[str]) -> Selection:
    parser = argparse.ArgumentParser(prog="pytest", allow_abbrev=False)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("-m", dest="marks", default="")
    parser.add_argument("-k", dest="keywords", default="")
    # What does not matter here.
    for option in ("-q", "-s", "--strict-markers", "--no-loadscope-reorder"):
        parser.add_argument(option, action="store_true")
    for option in ("--import-mode", "--dist", "-n"):
        parser.add_argument(option)
    options, rest = parser.parse_known_intermixed_args([*shlex.split(OPTIONS), *words])
    if rest:
        raise ValueError(f"what it takes with {rest} is not known")
    return Selection(tuple(options.paths) or ("tests",), options.keywords, options.marks)


def _recipe(target: str, variables: dict[str, str]) -> list[str]:
    """The options that a target gives to pytest, by itself or by one that it needs."""
    rule = re.search(rf"^{re.escape(target)}:([^#\n]*).*((?:\n\t.*)*)", MAKEFILE, re.MULTILINE)
    if rule is None:
        raise ValueError(f"there is no target {target}")
    if (words := re.search(r"python -m pytest\b(.*)", rule[2])) is not None:
        expanded = re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], ""), words[1])
        return shlex.split(expanded)
    for each in rule[1].split():
        try:
            return _recipe(each, variables)
        except ValueError:
            continue
    raise ValueError(f"the target {target} runs no tests")


def _files(path: str) -> list[Path]:
    found = ROOT / path
    if not found.exists():
        raise FileNotFoundError(path)
    return sorted(found.rglob("test_*.py")) if found.is_dir() else [found]


def _holds(expression: str, holds: Callable[[str], bool]) -> bool:
    """Whether it holds, as `-k` and `-m` have it: none at all does."""
    return not expression or Expression.compile(expression).evaluate(lambda name, **_: holds(name))


# -------------------------------------------------------------------------------------- source


def _tests(body: Sequence[ast.stmt], *classes: str) -> Iterator[tuple[Any, ...]]:
    """The classes, name and own marks of each test in here."""
    for each in body:
        match each:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if each.name.startswith("test"):
                    yield *classes, each.name, _marks(*each.decorator_list)
            case ast.ClassDef(name=name) if name.startswith("Test") and not _is_no_test(each):
                marks = _marks(*each.decorator_list)
                for *inner, own in _tests(each.body, *classes, name):
                    yield *inner, own | marks
                if any(_is_machine(base) for base in each.bases):
                    yield *classes, name, "runTest", marks
            case ast.Assign(value=value) if _is_machine(value):
                if (name := _target(each)).startswith("Test"):
                    yield *classes, name, "runTest", set()


def _is_no_test(definition: ast.ClassDef) -> bool:
    return any(
        isinstance(each, ast.Assign)
        and _target(each) == "__test__"
        and ast.unparse(each.value) == "False"
        for each in definition.body
    )


def _is_machine(value: ast.expr) -> bool:
    """Whether this is the test case of one of Hypothesis' state machines."""
    return isinstance(value, ast.Attribute) and value.attr == "TestCase"


def _target(statement: ast.Assign) -> str:
    return ast.unparse(statement.targets[0])


def _marks(*values: ast.expr) -> set[str]:
    """The names of the marks in `pytest.mark.name`, `pytest.mark.name(...)`, and lists of them."""
    found = set()
    for value in values:
        match value:
            case ast.List(elts=each) | ast.Tuple(elts=each):
                found |= _marks(*each)
            case ast.Starred(value=inner) | ast.Call(func=inner):
                found |= _marks(inner)
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name):
                found.add(name)
    return found


def _parameters(function: Function) -> list[str]:
    """The ids of a function's parameters, as in `name[id]`."""
    path, *names = function.node_id.split("::")
    value: Any = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for name in names:
        value = getattr(value, name)
    marks = [each for each in getattr(value, "pytestmark", []) if each.name == "parametrize"]
    return ["-".join(each) for each in itertools.product(*map(_ids, reversed(marks)))]


def _ids(parametrize: Any) -> list[str]:
    values, ids = parametrize.args[1], parametrize.kwargs.get("ids")
    if callable(ids):
        return [str(ids(each)) for each in values]
    return [each if isinstance(each, str) else "" for each in ids or values]
