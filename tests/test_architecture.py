"""The house keeps its plan: what is pure stays pure, and imports point down only.

The plan is that of docs/architecture.md. All of it is read off the syntax trees of src/sterna, so
that imports inside functions count as well, and nothing needs to be installed or started.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sterna"
MODULES = {
    ".".join(("sterna", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SOURCE.rglob("*.py"))
}

MAX_LINES = 500

PURE = (
    "sterna.types",
    "sterna.errors",
    "sterna.config",
    "sterna.messages",
    "sterna.policy",
    "sterna.migration",
    "sterna.global_scheduler",
    "sterna.fleet",
    "sterna.llumlet",
    "sterna.instance_core",
    "sterna.scheduler_core",
    "sterna.supervisor_core",
    "sterna.engine.emulated.core",
)
"""Modules and packages without clock, randomness, I/O, threads, asyncio, logging, ray, torch and
vllm. So is every module whose docstring says "Pure."."""

PURE_LIBRARIES = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "copy",
    "csv",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "numba",
    "numpy",
    "operator",
    "re",
    "struct",
    "types",
    "typing",
}
"""All that a pure module may import from elsewhere: a list of what is allowed misses nothing."""

IMPURE_BUILTINS = {"breakpoint", "eval", "exec", "input", "open", "print"}

NUMPYS_RANDOMNESS = {"np.random", "numpy.random"}

FOUNDATION = {"types", "errors", "config", "classes", "decoding"}
VOCABULARY = FOUNDATION | {"messages", "migration.messages", "stream_messages"}

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "types": set(),
    "errors": {"types"},
    "decoding": set(),
    "config": {"types", "errors"},
    "classes": {"types", "errors"},
    "migration.messages": {"types"},
    "stream_messages": {"types"},
    "messages": {"types", "migration.messages", "stream_messages"},
    "delivery": set(),
    "parts": set(),
    "folders": set(),
    "complaints": set(),
    "mailbox": VOCABULARY | {"complaints", "delivery", "parts"},
    "policy": FOUNDATION,
    "migration": FOUNDATION | {"migration.messages"},
    "transport": FOUNDATION,
    "workload": FOUNDATION,
    "metrics": FOUNDATION,
    "engine": VOCABULARY | {"__init__", "transport", "folders"},
    "global_scheduler": VOCABULARY | {"policy"},
    "fleet": FOUNDATION,
    "progress": VOCABULARY,
    "lease": set(),
    "llumlet": VOCABULARY | {"policy", "migration"},
    "emptying": FOUNDATION,
    "sending": VOCABULARY,
    "arrivals": {"types"},
    "instance_core": VOCABULARY | {"llumlet", "arrivals", "emptying", "sending"},
    "supervisor_core": VOCABULARY | {"fleet", "progress", "sending"},
    "scheduler_core": VOCABULARY | {"policy", "global_scheduler", "sending"},
    "frontend.effects": VOCABULARY,
    "frontend.http": VOCABULARY | {"frontend.effects"},
    "frontend": VOCABULARY | {"mailbox", "engine", "folders", "frontend.effects", "frontend.http"},
    "runtime": VOCABULARY
    | {
        "complaints",
        "folders",
        "mailbox",
        "policy",
        "engine",
        "transport",
        "global_scheduler",
        "fleet",
        "progress",
        "lease",
        "llumlet",
        "sending",
        "instance_core",
        "scheduler_core",
        "supervisor_core",
        "frontend",
    },
    "simulator": VOCABULARY
    | {"policy", "engine", "global_scheduler", "llumlet", "frontend", "workload", "metrics"},
    "hostile": VOCABULARY
    | {
        "policy",
        "migration",
        "engine",
        "fleet",
        "lease",
        "llumlet",
        "sending",
        "instance_core",
        "scheduler_core",
        "supervisor_core",
        "frontend",
        "frontend.effects",
    },
    "cli": VOCABULARY
    | {"__init__", "policy", "engine", "transport", "workload", "metrics", "runtime", "simulator"},
}
"""For each component, the others that it may import. The most specific name holds."""

CONFINED = {
    "ray": ("sterna.runtime",),
    "vllm": (
        "sterna.engine.vllm",
        "sterna.frontend.http.request_errors",
        "sterna.frontend.router",
        "sterna.frontend.server",
    ),
    "fastapi": ("sterna.frontend",),
    "starlette": ("sterna.frontend",),
    "uvicorn": ("sterna.frontend",),
}
"""Libraries that only these modules and packages may import; in the front end, vLLM's types end
at its two adapters: the engine-core client and the server."""

PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
"""What reads of these can run code that the writer chose; the pipes of multiprocessing pickle."""

PICKLING_NAMES = {"allow_pickle", "recv_pyobj", "send_pyobj"}

MAY_PICKLE = {
    # Ray's arguments, which are pickled anyhow, have the options of `vllm serve` in them.
    "sterna.runtime.packed_args": {"pickle"},
    "sterna.runtime.actors": {"pickle"},
    # Pipes that the other end's process has inherited.
    "sterna.runtime.driver": {"multiprocessing", "pickle"},
    "sterna.runtime.driver_process": {"cloudpickle", "multiprocessing"},
    "sterna.simulator.runs": {"multiprocessing"},
}
"""All that pickle, and how (docs/security.md says why nobody else comes near)."""


def imported_modules(tree: ast.Module, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Every module that the tree imports, wherever in it, by its full name.

    `from package import name` gives `package.name` where that is a module of Sterna, or numpy's
    randomness.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + (1 if is_package else 0)
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in {*MODULES, "numpy.random"} else base


def imported_at_once(tree: ast.Module, module: str) -> set[str]:
    """The modules of Sterna that are imported with this one: in no function, and not for the sake
    of types alone."""
    at_once = ast.Module(body=[], type_ignores=[])
    for node in tree.body:
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_for_types:
            at_once.body.append(node)
    return {name for name in imported_modules(at_once, module) if name in MODULES}


def imported_in_the_end(module: str) -> set[str]:
    """All modules of Sterna that are there when this one is imported."""
    found: set[str] = set()
    left = [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += imported_at_once(TREES[name], name)
    return found


def is_within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def is_declared_pure(tree: ast.Module) -> bool:
    return "Pure." in (ast.get_docstring(tree) or "").split("\n\n")[0]


def component_of(module: str) -> str:
    """The key of MAY_IMPORT under which the module falls."""
    inner = module.removeprefix("sterna").removeprefix(".") or "__init__"
    fitting = [name for name in MAY_IMPORT if is_within(inner, (name,))]
    assert fitting, f"{module} has no place in the plan: give it one in MAY_IMPORT"
    return max(fitting, key=len)


def impurities(tree: ast.Module, module: str, pure_modules: set[str]) -> list[str]:
    """What a pure module must not do, in words."""
    found = []
    for name in imported_modules(tree, module):
        if name.split(".")[0] == "sterna":
            if name not in pure_modules:
                found.append(f"imports {name}, which is not pure")
        elif name.split(".")[0] not in PURE_LIBRARIES or is_within(name, ("numpy.random",)):
            found.append(f"imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in IMPURE_BUILTINS:
            found.append(f"uses {node.id}")
        # A generator that was seeded elsewhere may come in; none may be made here.
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in NUMPYS_RANDOMNESS
            and node.attr != "Generator"
        ):
            found.append(f"uses numpy.random.{node.attr}")
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            found.append("is asynchronous")
    return found


def forbidden_arrows(tree: ast.Module, module: str) -> list[str]:
    """The module's imports that point up or sideways, or at a library of somebody else."""
    component = component_of(module)
    found = []
    is_package = module in MODULES and MODULES[module].name == "__init__.py"
    for name in imported_modules(tree, module, is_package=is_package):
        library = name.split(".")[0]
        if library == "sterna":
            target = component_of(name)
            if target != component and target not in MAY_IMPORT[component]:
                found.append(f"{component} -> {name}")
        elif library in CONFINED and not is_within(module, CONFINED[library]):
            found.append(f"{component} -> {name}")
    return found


def picklers(tree: ast.Module) -> set[str]:
    """By what the module pickles, or may."""
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= PICKLERS & {part for name in names for part in name.split(".")}
        for name in (getattr(node, "attr", None), getattr(node, "arg", None)):
            found |= {name} & PICKLING_NAMES
    return found


TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}
PURE_MODULES = {
    name for name, tree in TREES.items() if is_within(name, PURE) or is_declared_pure(tree)
}


def test_the_source_is_found() -> None:
    """Else everything below would hold of nothing."""
    assert {"sterna.types", "sterna.policy.pairing", "sterna.global_scheduler"} <= PURE_MODULES
    assert "sterna.runtime.actors" in MODULES
    assert "sterna.runtime.actors" not in PURE_MODULES


@pytest.mark.parametrize("module", sorted(PURE_MODULES))
def test_a_pure_module_is_pure(module: str) -> None:
    assert impurities(TREES[module], module, PURE_MODULES) == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down_only(module: str) -> None:
    assert forbidden_arrows(TREES[module], module) == []


def test_nothing_of_resumable_streams_is_imported_with_a_front_end() -> None:
    """They are optional: `FrontendServer` imports them where it is told to keep streams."""
    found = imported_in_the_end("sterna.frontend.server")
    assert {"sterna.frontend.router", "sterna.frontend.http.door"} <= found
    assert [name for name in found if is_within(name, ("sterna.frontend.resumable",))] == []


def test_nobody_pickles_but_those_who_may() -> None:
    users = {module: found for module, tree in TREES.items() if (found := picklers(tree))}
    assert users == MAY_PICKLE


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_is_short_enough_to_be_read(module: str) -> None:
    num_lines = len(MODULES[module].read_text("utf-8").splitlines())
    assert num_lines <= MAX_LINES


def test_the_plan_has_no_circle() -> None:
    """Components can be laid on top of each other, so that "down" means something."""
    left = dict(MAY_IMPORT)
    while left:
        lowest = [name for name, below in left.items() if not below & left.keys()]
        assert lowest, f"these import each other in a circle: {sorted(left)}"
        for name in lowest:
            del left[name]


def test_the_plan_names_components_only() -> None:
    assert set().union(*MAY_IMPORT.values()) <= MAY_IMPORT.keys()


# ---------------------------------------------------------------- the checks find what they seek


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", ["imports time"]),
        ("import random as r", ["imports random"]),
        ("from os import path", ["imports os"]),
        ("import numpy.random", ["imports numpy.random"]),
        ("from numpy.random import default_rng", ["imports numpy.random"]),
        ("from numpy import random", ["imports numpy.random"]),
        ("import numpy as np\nrng = np.random.default_rng(3)", ["uses numpy.random.default_rng"]),
        ("import numpy as np\ndef f(rng: np.random.Generator): pass", []),
        ("def f():\n    import threading", ["imports threading"]),
        ("from sterna.mailbox import Mailbox", ["imports sterna.mailbox, which is not pure"]),
        ("from sterna import mailbox", ["imports sterna.mailbox, which is not pure"]),
        ("from .. import mailbox", ["imports sterna.mailbox, which is not pure"]),
        ("x = open('x')", ["uses open"]),
        ("async def f(): pass", ["is asynchronous"]),
        ("import math\nfrom collections.abc import Iterable", []),
        ("from sterna.types import HIGH\nfrom sterna.policy import pairing", []),
        ("from .pairing import pair", []),
    ],
)
def test_an_impurity_is_found(source: str, found: list[str]) -> None:
    assert impurities(ast.parse(source), "sterna.policy.dispatch", PURE_MODULES) == found


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("policy.pairing", "import sterna.runtime.actors", ["policy -> sterna.runtime.actors"]),
        ("policy.pairing", "from ..migration import source", ["policy -> sterna.migration.source"]),
        ("types", "from sterna.config import PolicyConfig", ["types -> sterna.config"]),
        ("messages", "import sterna.migration.source", ["messages -> sterna.migration.source"]),
        ("messages", "from sterna.migration.messages import Mode", []),
        ("frontend.admin", "from ..runtime import actors", ["frontend -> sterna.runtime.actors"]),
        ("frontend.streams", "from vllm.v1.engine import x", ["frontend -> vllm.v1.engine"]),
        ("frontend.server", "from vllm.v1.engine import x", []),
        ("engine.interface", "import vllm", ["engine -> vllm"]),
        ("engine.vllm.core", "import vllm", []),
        ("frontend.admin", "def f():\n    import ray", ["frontend -> ray"]),
        ("runtime.actors", "import ray\nfrom fastapi import FastAPI", ["runtime -> fastapi"]),
        ("runtime.scheduler", "from sterna import global_scheduler as core", []),
    ],
)
def test_a_forbidden_arrow_is_found(module: str, source: str, found: list[str]) -> None:
    assert forbidden_arrows(ast.parse(source), f"sterna.{module}") == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", {"pickle"}),
        ("from pickle import loads as read", {"pickle"}),
        ("def f():\n    from ray import cloudpickle", {"cloudpickle"}),
        ("import ray.cloudpickle as p", {"cloudpickle"}),
        ("from multiprocessing.connection import Connection", {"multiprocessing"}),
        ("socket.send_pyobj(x)", {"send_pyobj"}),
        ("numpy.load(x, allow_pickle=True)", {"allow_pickle"}),
        ("import msgspec\nfrom .frames import pack", set()),
    ],
)
def test_a_pickler_is_found(source: str, found: set[str]) -> None:
    assert picklers(ast.parse(source)) == found


def test_what_is_imported_at_once_is_told_from_what_is_imported_later() -> None:
    source = """
from typing import TYPE_CHECKING
from sterna.types import NORMAL
try:
    import sterna.errors
except ImportError:
    pass
if TYPE_CHECKING:
    from sterna.config import PolicyConfig
def f():
    import sterna.mailbox
"""
    tree = ast.parse(source)
    assert imported_at_once(tree, "sterna.policy.x") == {"sterna.types", "sterna.errors"}


def test_a_module_outside_the_plan_is_found() -> None:
    with pytest.raises(AssertionError, match=r"sterna\.utils"):
        component_of("sterna.utils")


def test_a_docstring_declares_a_module_pure_in_its_first_paragraph() -> None:
    assert is_declared_pure(ast.parse('"""What it is.\nPure.\n\nMore."""'))
    assert not is_declared_pure(ast.parse('"""What it is.\n\nPure."""'))
