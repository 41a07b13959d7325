"""docs/internals/vllm_names.md: the names of vLLM that the code uses, and no more than before."""

import importlib.util
from pathlib import Path

import pytest

from scripts.vllm_names import (
    MAX_NAMES,
    PAGE,
    Installed,
    Name,
    every,
    names_used,
    page,
    sources,
)

REQUEST = Name(("vllm.v1.request",), "Request")
IMPORT = "from vllm.v1.request import Request\n"
BASE = "from vllm.v1.core import Scheduler\n"
SCHEDULER = Name(("vllm.v1.core",), "Scheduler")


def test_the_page_has_the_names_that_the_code_uses() -> None:
    used = names_used(sources())
    assert PAGE.read_text("utf-8") == page(used), "write it: python -m scripts.vllm_names"
    assert len(every(used)) <= MAX_NAMES, "raise MAX_NAMES if the change needs more of vLLM"


def test_the_source_is_found() -> None:
    used = names_used(sources())
    assert {"engine/vllm/scheduler.py", "frontend/vllm_server/server.py"} <= used.keys()
    scheduler = used["engine/vllm/scheduler.py"]
    module = ("vllm.v1.core.sched.scheduler",)
    assert {Name(module, "Scheduler._free_request"), Name(module, "Scheduler.running")} <= scheduler


@pytest.mark.vllm
def test_the_installed_vllm_has_every_name() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    assert Installed(Path(found.origin).parents[1]).lacks(every(names_used(sources()))) == []


# ---------------------------------------------------------------- the checks find what they seek


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vllm.v1.worker", [Name(("vllm.v1.worker",), "")]),
        (
            "import vllm.envs as envs\nenvs.VLLM_X",
            [Name(("vllm.envs",), ""), Name(("vllm.envs",), "VLLM_X")],
        ),
        (f"{IMPORT}def f(r: Request): r.num_tokens", [REQUEST, REQUEST.then("num_tokens")]),
        (f"{IMPORT}def f(r: Request | None): return r.a", [REQUEST, REQUEST.then("a")]),
        (f"{IMPORT}def f(r: 'Request'): return [x for x in r.a]", [REQUEST, REQUEST.then("a")]),
        (f"{IMPORT}def f(r): return r.num_tokens", [REQUEST]),
        (f"{IMPORT}def f(r): return r._private", [Name((), "_private"), REQUEST]),
        (f"{IMPORT}def f(r): return r._ours\ndef _ours(): pass", [REQUEST]),
        (f"{IMPORT}r = Request()\nr.a", [REQUEST, REQUEST.then("a")]),
        (
            f"{IMPORT}r = Request.from_x()\nr.a",
            [REQUEST, REQUEST.then("a"), REQUEST.then("from_x")],
        ),
        (
            f"{IMPORT}class A:\n def f(self) -> Request | None: ...\n def g(self): self.f().a",
            [REQUEST, REQUEST.then("a")],
        ),
        (
            f"{IMPORT}class A:\n r: Request\n def g(self): self.r.a",
            [REQUEST, REQUEST.then("a")],
        ),
        (
            f"{IMPORT}class A:\n def pop(self) -> Request: ...\n"
            " def g(self): self.pop().a, self.x.pop().b",
            [REQUEST, REQUEST.then("a")],
        ),
        (f"{IMPORT}Request.KIND.value", [REQUEST, REQUEST.then("KIND")]),
        (f"{IMPORT}Request['x'].is_y", [REQUEST, REQUEST.then("is_y")]),
        ("import torch\ntorch.ops._private", []),
        (
            f"{BASE}class Ours(Scheduler):\n"
            " def __init__(self): self.ours = self.theirs\n"
            " def f(self):\n  super().f()\n  self.late = 1\n  self.ours, self.f()",
            [SCHEDULER, *map(SCHEDULER.then, ("f", "late", "theirs"))],
        ),
        (
            "try:\n from vllm.new import args\nexcept ImportError:\n from vllm.old import args\n"
            "args.check",
            [Name(("vllm.new", "vllm.old"), path) for path in ("args", "args.check")],
        ),
    ],
)
def test_names_are_read(source: str, found: list[Name]) -> None:
    assert names_used({"engine/vllm/x.py": source}).get("engine/vllm/x.py", set()) == set(found)


def test_attributes_are_those_of_the_class_that_another_file_extends() -> None:
    files = {
        "engine/vllm/a.py": f"{BASE}class Ours(Scheduler):\n def ours(self): ...",
        "engine/vllm/b.py": "def f(s: Ours): s.ours(), s.theirs",
    }
    assert names_used(files)["engine/vllm/b.py"] == {SCHEDULER.then("theirs")}


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    """A small vLLM."""
    for name, text in {
        "vllm/__init__.py": "if TYPE_CHECKING:\n    from vllm.a import Thing as Alias\n",
        "vllm/a.py": "from .b import Base\nimport argparse\nfrom argparse import ArgumentParser\n"
        "class Thing(Base):\n    x: int\n    def f(self):\n        self.y = 1\n"
        "class Parser(ArgumentParser): ...\n",
        "vllm/b/__init__.py": "from vllm.b.c import *\n",
        "vllm/b/c.py": "class Base:\n    z = 1\ndef g(): ...\nLIMIT: int = 3\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return Installed(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        *("a", "a:Thing", "a:Thing.x", "a:Thing.f", "a:Thing.y", "a:Thing.z", ":Alias.z"),
        *("b:g", "b:c", "b:c.g", "b.c:LIMIT", "a:Parser.parse_args"),
    ],
)
def test_a_name_that_is_there_is_not_missed(installed: Installed, path: str) -> None:
    module, _, name = path.partition(":")
    assert installed.lacks([Name((f"vllm.{module}".rstrip("."),), name)]) == []


@pytest.mark.parametrize(
    "path", ["d", "a:Nothing", "a:Thing.w", "b:h", "a:Parser.no_such", ":Alias.w", "b:c.h"]
)
def test_a_name_that_is_missing_is_found(installed: Installed, path: str) -> None:
    module, _, name = path.partition(":")
    missing = Name((f"vllm.{module}".rstrip("."),), name)
    assert installed.lacks([missing]) == [missing]


def test_one_of_several_places_is_enough(installed: Installed) -> None:
    assert installed.lacks([Name(("vllm.d", "vllm.b"), "g")]) == []


def test_private_attributes_are_looked_for_everywhere(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "vllm" / "d.py").write_text("class A:\n    def _f(self):\n        self._g = 1\n")
    names = [Name((), each) for each in ("_f", "_g", "_h")]
    assert installed.lacks(names) == [Name((), "_h")]
