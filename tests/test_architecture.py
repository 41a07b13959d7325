"""Plan of the tree: rooms stay small and named, pure stays pure, imports point down only.

The plan is that of docs/architecture.md. All of it is read off the syntax trees of src/sterna, so
that imports inside functions count as well, and nothing needs to be installed or started.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sterna"
PACKAGES = {"sterna": SOURCE, "fault_simulation": ROOT / "fault_simulation"}
MODULES = {
    ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for package, folder in PACKAGES.items()
    for path in sorted(folder.rglob("*.py"))
}

MAX_MODULES_AT_THE_ROOT = 8

MAX_MODULES_IN_A_FOLDER = 14

LARGER_FOLDERS = {
    "src/sterna/engine/vllm": 18,  # one module for each extension point of vLLM
}

MIN_LINES = 40

SHORT_MODULES = {
    "sterna.own_log": "of the logs of several rooms",
    "sterna.messaging.send_effects": "the vocabulary of all actors' cores",
    "sterna.runtime.actors.member_status": "the answer of each kind of actor to recovery",
    "sterna.runtime.actors.packed_args": "one of the few modules that may pickle",
    "sterna.runtime.supervisor.ray_errors": "of the supervisor and of the driver",
    "sterna.runtime.supervisor.tasks": "handed to the supervisor's parts",
    "sterna.transport.plane_context": "handed to each connection of a plane",
    "sterna.workload.randomness": "of arrivals, lengths and classes",
    "sterna.workload.seeds": "numpy-free, for the command line",
}
"""Modules of fewer lines, each with what keeps it from being part of another."""

SHARED_FILE_NAMES = {
    "config": "the options of a room",
    "core": "the pure core of an actor or of an engine",
    "shell": "what drives an actor's core: sockets, clock, tasks",
}
"""Names that several files have, with the one thing that each of these files is."""

PURE = (
    "sterna.types",
    "sterna.errors",
    "sterna.config",
    "sterna.priority_classes",
    "sterna.messages",
    "sterna.messaging.reliable_channel",
    "sterna.messaging.framing",
    "sterna.messaging.send_effects",
    "sterna.policy",
    "sterna.migration",
    "sterna.scheduler.core",
    "sterna.scheduler.global_scheduler",
    "sterna.instance.core",
    "sterna.instance.llumlet",
    "sterna.supervisor",
    "sterna.frontend.requests",
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
    "difflib",
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

ROOT_MODULES: dict[str, set[str]] = {
    "sterna.types": set(),
    "sterna.errors": set(),
    "sterna.config": {"sterna.types", "sterna.errors"},
    "sterna.priority_classes": {"sterna.types", "sterna.errors"},
    "sterna.policy_file": {
        "sterna.config",
        "sterna.errors",
        "sterna.own_log",
        "sterna.policy",
    },
    "sterna.priority_files": {"sterna.errors", "sterna.priority_classes", "sterna.types"},
    "sterna.folders": set(),
    "sterna.own_log": set(),
}
"""What the modules at the root import. What a folder imports is said in its `__init__.py`."""

CONFINED = {
    "ray": ("sterna.runtime",),
    "vllm": (
        "sterna.engine.vllm",
        "sterna.frontend.http.request_errors",
        "sterna.frontend.vllm_server.pooling_failures",
        "sterna.frontend.vllm_server.prompt_hashes",
        "sterna.frontend.vllm_server.router",
        "sterna.frontend.vllm_server.server",
    ),
    "fastapi": ("sterna.frontend",),
    "starlette": ("sterna.frontend",),
    "uvicorn": ("sterna.frontend",),
    "textual": ("sterna.cli.operate.top_app",),
}
"""Libraries that only these modules and packages may import; in the front end, vLLM's types end
at its adapters: the engine-core client, with its prompts' hashes, and the server."""

PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
"""What reads of these can run code that the writer chose; the pipes of multiprocessing pickle."""

PICKLING_NAMES = {"allow_pickle", "recv_pyobj", "send_pyobj"}

MAY_PICKLE = {
    # Ray's arguments, which are pickled anyhow, have the options of `vllm serve` in them.
    "sterna.runtime.actors.packed_args": {"pickle"},
    "sterna.runtime.actors.actor_classes": {"pickle"},
    # Pipes that the other end's process has inherited.
    "sterna.runtime.home.options_process": {"cloudpickle", "pickle"},
    "sterna.runtime.home.driver": {"multiprocessing", "pickle"},
    "sterna.runtime.home.driver_process": {"cloudpickle", "multiprocessing"},
    "sterna.simulator.runs": {"multiprocessing"},
}
"""All that pickle, and how (docs/security.md says why nobody else comes near)."""


FOLDERS = {
    str(path.parent.relative_to(ROOT))
    for root in (SOURCE, ROOT / "fault_simulation", ROOT / "bench")
    for path in root.rglob("*.py")
}


def imported_modules(tree: ast.Module, module: str) -> Iterator[str]:
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
                keep = len(parents) - node.level
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


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def room_of(module: str) -> str:
    """The folder that the module is in, or the module itself at the root of `sterna`."""
    if module in MODULES and is_package(module):
        return module
    folder = module.rpartition(".")[0]
    return module if folder == "sterna" else folder


@dataclass(frozen=True, slots=True)
class Introduction:
    """The docstring of a room's `__init__.py`: text, and the two lists at its end.

    Attributes:
        offers: the modules that other rooms of the package import.
        imports: the other rooms that are imported here.
    """

    text: str
    offers: list[str]
    imports: list[str]


def introduction_of(room: str) -> Introduction:
    docstring = ast.get_docstring(TREES[room]) or ""
    found = re.fullmatch(r"(.+)\n\nOffers: ([^.].*?)\.\nImports: (.+)\.", docstring, re.DOTALL)
    assert found, f"{MODULES[room]} is to end with the lines `Offers: ...` and `Imports: ...`"
    text, *lists = found.groups()
    offers, imports = ([] if names == "nothing" else re.split(r",\s+", names) for names in lists)
    return Introduction(text, offers, imports)


def plan() -> dict[str, set[str]]:
    """For each room, the others that it imports."""
    rooms = {
        room: {f"sterna.{name}" if f"sterna.{name}" in MODULES else name for name in names}
        for room in ROOMS
        for names in [introduction_of(room).imports]
    }
    return {**ROOT_MODULES, **rooms}


def imports_of_room(room: str) -> set[str]:
    return {
        room_of(name)
        for module, tree in TREES.items()
        if room_of(module) == room
        for name in imported_modules(tree, module)
        if name in MODULES
    } - {room}


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


def strangers(tree: ast.Module, module: str) -> list[str]:
    """The libraries that the module imports, and that are confined to others."""
    return [
        name
        for name in imported_modules(tree, module)
        if (library := name.split(".")[0]) in CONFINED and not is_within(module, CONFINED[library])
    ]


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
ROOMS = sorted(module for module in MODULES if is_package(module) and module != "sterna")
PURE_MODULES = {
    name for name, tree in TREES.items() if is_within(name, PURE) or is_declared_pure(tree)
}


def test_the_source_is_found() -> None:
    """Else everything below would hold of nothing."""
    assert {
        "sterna.types",
        "sterna.policy.pairing",
        "sterna.scheduler.global_scheduler",
    } <= PURE_MODULES
    assert "sterna.runtime.actors.actor_classes" in MODULES
    assert "sterna.runtime.actors.actor_classes" not in PURE_MODULES


@pytest.mark.parametrize("module", sorted(PURE_MODULES))
def test_a_pure_module_is_pure(module: str) -> None:
    assert impurities(TREES[module], module, PURE_MODULES) == []


@pytest.mark.parametrize("room", [*ROOT_MODULES, *ROOMS])
def test_a_room_imports_what_the_plan_says(room: str) -> None:
    assert imports_of_room(room) == plan()[room]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_library_stays_where_it_belongs(module: str) -> None:
    assert strangers(TREES[module], module) == []


def test_nothing_of_resumable_streams_is_imported_with_a_front_end() -> None:
    """They are optional: `FrontendServer` imports them where it is told to keep streams."""
    found = imported_in_the_end("sterna.frontend.vllm_server.server")
    assert {"sterna.frontend.vllm_server.router", "sterna.frontend.http.door"} <= found
    assert [name for name in found if is_within(name, ("sterna.frontend.resumable",))] == []


def test_nobody_pickles_but_those_who_may() -> None:
    users = {module: found for module, tree in TREES.items() if (found := picklers(tree))}
    assert users == MAY_PICKLE


def test_the_root_has_few_modules() -> None:
    at_the_root = [path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py"]
    assert len(at_the_root) <= MAX_MODULES_AT_THE_ROOT


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_can_be_looked_over(folder: str) -> None:
    modules = [path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= LARGER_FOLDERS.get(folder, MAX_MODULES_IN_A_FOLDER)


def test_a_file_name_says_which_file_is_meant() -> None:
    count = Counter(
        path.stem
        for path in SOURCE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    assert {name for name, times in count.items() if times > 1} == SHARED_FILE_NAMES.keys()


def test_a_module_is_no_sliver() -> None:
    short = {
        module
        for module, path in MODULES.items()
        if not is_package(module) and len(path.read_text("utf-8").splitlines()) < MIN_LINES
    }
    assert short == SHORT_MODULES.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_others_import(room: str) -> None:
    asked = {
        name.removeprefix(f"{room}.")
        for module, tree in TREES.items()
        if room_of(module) != room and module.split(".")[0] == room.split(".")[0]
        for name in imported_modules(tree, module)
        if name in MODULES and room_of(name) == room and name != room
    }
    assert introduction_of(room).offers == sorted(asked)


def test_the_plan_has_no_circle() -> None:
    """Rooms can be laid on top of each other, so that imports point down."""
    left = plan()
    while left:
        lowest = [name for name, below in left.items() if not below & left.keys()]
        assert lowest, f"these import each other in a circle: {sorted(left)}"
        for name in lowest:
            del left[name]


def test_the_plan_names_rooms_only() -> None:
    assert set().union(*plan().values()) <= plan().keys() | {"sterna"}


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
        (
            "from sterna.messaging.mailbox import Mailbox",
            ["imports sterna.messaging.mailbox, which is not pure"],
        ),
        (
            "from sterna.messaging import mailbox",
            ["imports sterna.messaging.mailbox, which is not pure"],
        ),
        (
            "from ..messaging import mailbox",
            ["imports sterna.messaging.mailbox, which is not pure"],
        ),
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
        ("frontend.peers", "from vllm.v1.engine import x", ["vllm.v1.engine"]),
        ("frontend.vllm_server.server", "from vllm.v1.engine import x", []),
        ("engine.interface", "import vllm", ["vllm"]),
        ("engine.vllm.engine", "import vllm", []),
        ("frontend.peers", "def f():\n    import ray", ["ray"]),
        ("runtime.home.launch", "import ray\nfrom fastapi import FastAPI", ["fastapi"]),
        ("scheduler.core", "from sterna.scheduler import global_scheduler as rules", []),
    ],
)
def test_a_library_that_strays_is_found(module: str, source: str, found: list[str]) -> None:
    assert strangers(ast.parse(source), f"sterna.{module}") == found


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("sterna.types", "sterna.types"),
        ("sterna.policy.pairing", "sterna.policy"),
        ("sterna.migration.messages", "sterna.migration.messages"),
        ("sterna.engine.vllm.engine", "sterna.engine.vllm"),
        ("fault_simulation.run", "fault_simulation"),
    ],
)
def test_a_module_is_in_the_room_of_its_folder(module: str, room: str) -> None:
    assert room_of(module) == room


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
    import sterna.messaging.mailbox
"""
    tree = ast.parse(source)
    assert imported_at_once(tree, "sterna.policy.x") == {"sterna.types", "sterna.errors"}


def test_a_docstring_declares_a_module_pure_in_its_first_paragraph() -> None:
    assert is_declared_pure(ast.parse('"""What it is.\nPure.\n\nMore."""'))
    assert not is_declared_pure(ast.parse('"""What it is.\n\nPure."""'))
