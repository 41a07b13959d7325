"""Names of vLLM that Sterna uses, read from the syntax trees of src/sterna.

    python -m scripts.vllm_names                 # writes docs/internals/vllm_names.md
    python -m scripts.vllm_names --check FOLDER  # prints those that the vLLM in FOLDER lacks

A name is an imported module, class, function or constant; an attribute of one of these; an
attribute of a variable that is annotated with a class of vLLM; or an attribute of a class of vLLM
that a class of Sterna extends. Attributes of other values of vLLM are in the list only where their
names are private. The check reads the files of vLLM and imports none of them.
"""

import argparse
import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sterna"
PAGE = ROOT / "docs" / "internals" / "vllm_names.md"

MAX_NAMES = 331
"""What the list may grow to. Every name is one that the next vLLM may lack: raise this only for a
change that needs more of vLLM."""

ADAPTERS = ("engine/vllm/", "frontend/vllm_server/")
"""Folders whose values of unknown classes may be vLLM's."""

_CONTAINERS_METHODS = frozenset((*dir(dict), *dir(list), *dir(set)))


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A name of vLLM.

    Attributes:
        modules: where it is, by full names; several where versions of vLLM differ, and none for a
            private attribute of a value whose class the tree does not show.
        path: within the module, such as "Scheduler.running"; "" for the module itself.
    """

    modules: tuple[str, ...]
    path: str

    def then(self, attribute: str) -> "Name":
        """The name of an attribute of this one."""
        return Name(self.modules, f"{self.path}.{attribute}" if self.path else attribute)


@dataclass(frozen=True, slots=True)
class Instance:
    """A value of a class of vLLM.

    Attributes:
        own: attributes that a class of Sterna between the value and vLLM's class defines.
    """

    of: Name
    own: frozenset[str] = frozenset()


# ------------------------------------------------------------------------ what Sterna's code uses


def names_used(sources: dict[str, str]) -> dict[str, set[Name]]:
    """The names of vLLM that each file uses; files without any are left out.

    Args:
        sources: Python code, by the file's path below `sterna`.
    """
    trees = {file: ast.parse(source) for file, source in sources.items()}
    classes = _extending_classes(trees)
    defined = {name for tree in trees.values() for name in _defined(tree)}
    used = {}
    for file, tree in trees.items():
        reader = _Reader(tree, classes)
        reader.read(tree.body, {})
        found = reader.found
        if file.startswith(ADAPTERS):
            found |= {Name((), name) for name in reader.private - defined - _argparses()}
        if found:
            used[file] = found
    return used


def _extending_classes(trees: dict[str, ast.Module]) -> dict[str, Instance]:
    """For each class of Sterna that extends one of vLLM's, what its instances are."""
    found: dict[str, Instance] = {}
    for tree in trees.values():
        bound = _imports(tree)[0]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            names = [base.id for base in node.bases if isinstance(base, ast.Name)]
            own = frozenset(_own_members(node))
            for name in names:
                if name in bound:
                    found.setdefault(node.name, Instance(bound[name], own))
                elif name in found:
                    found[node.name] = Instance(found[name].of, own | found[name].own)
                    break
    return found


def _imports(tree: ast.AST) -> tuple[dict[str, Name], set[str]]:
    """The local names of what is imported of vLLM, wherever in the tree, and those of the rest."""
    bound: dict[str, Name] = {}
    others: set[str] = set()
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            local = alias.asname or alias.name.split(".")[0]
            if isinstance(node, ast.ImportFrom):
                name = Name((node.module or "",), alias.name)
            else:
                name = Name((alias.name if alias.asname else local,), "")
            if name.modules[0].split(".")[0] != "vllm":
                others.add(local)
            else:
                # Twice where versions of vLLM differ.
                bound[local] = _either(name, bound[local]) if local in bound else name
    return bound, others


def _either(one: Name, other: Name) -> Name:
    """A name that is in the modules of both."""
    if one.path != other.path:
        return one
    return Name(tuple(sorted({*one.modules, *other.modules})), one.path)


class _Reader:
    """Reads one file.

    Attributes:
        found: the names of vLLM.
        private: private attributes of values of unknown classes.
    """

    def __init__(self, tree: ast.Module, classes: dict[str, Instance]) -> None:
        self._bound, self._others = _imports(tree)
        self._classes = classes
        self._returned: dict[str, ast.expr] = {}
        self._annotations: dict[str, ast.expr] = {}
        self.found: set[Name] = set()
        self.private: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
                self._returned[node.name] = node.returns
            elif isinstance(node, ast.Import):
                self._add_modules(alias.name for alias in node.names)
        self.found |= {name for name in self._bound.values() if name.path}

    def _add_modules(self, modules: Iterable[str]) -> None:
        self.found |= {Name((each,), "") for each in modules if each.split(".")[0] == "vllm"}

    def read(self, body: Iterable[ast.AST], known: dict[str, Instance | None]) -> None:
        """Read statements in which these variables have these values; None for unknown ones."""
        for node in body:
            match node:
                case ast.ClassDef():
                    made = self._classes.get(node.name)
                    self._annotations = _annotations(node)
                    self.read(ast.iter_child_nodes(node), {**known, "self": made})
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    self.read(ast.iter_child_nodes(node), {**known, **self._parameters(node)})
                case ast.AnnAssign(target=ast.Name(id=name)):
                    known[name] = self._annotated(node.annotation)
                    self.read(ast.iter_child_nodes(node), known)
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self.read([node.value], known)
                    known[name] = self._instance(node.value, known)
                case ast.Attribute():
                    self._value_of(node, known)
                    self.read([node.value], known)
                case _:
                    self.read(ast.iter_child_nodes(node), known)

    def _parameters(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ) -> dict[str, Instance | None]:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {each.arg: self._annotated(each.annotation) for each in every if each.arg != "self"}

    def _annotated(self, annotation: ast.expr | None) -> Instance | None:
        """A value of this annotation, where that is one class, perhaps beside None."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self._annotated(ast.parse(text, mode="eval").body)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                both = [made for each in (left, right) if (made := self._annotated(each))]
                if len(both) < 2:
                    return both[0] if both else None
                return Instance(_either(both[0].of, both[1].of))
            case ast.Name(id=name) if name in self._bound:
                return Instance(self._bound[name])
            case ast.Name(id=name):
                return self._classes.get(name)
        return None

    def _instance(self, value: ast.expr, known: dict[str, Instance | None]) -> Instance | None:
        found = self._value_of(value, known)
        return found if isinstance(found, Instance) else None

    def _value_of(
        self, node: ast.expr, known: dict[str, Instance | None]
    ) -> Name | Instance | None:
        """What the expression is, as far as it is of vLLM; notes the attributes in it."""
        match node:
            case ast.Name(id=name):
                return known[name] if name in known else self._bound.get(name)
            case ast.Attribute():
                return self._attribute(node, known)
            case ast.Subscript():
                # A member of an enumeration.
                found = self._value_of(node.value, known)
                return Instance(found) if isinstance(found, Name) else None
            case ast.Call(func=ast.Name(id="super")):
                made = known.get("self")
                return None if made is None else Instance(made.of)
            case ast.Call():
                return self._called(node.func, known)
        return None

    def _called(self, function: ast.expr, known: dict[str, Instance | None]) -> Instance | None:
        found = self._value_of(function, known)
        if isinstance(found, Name):
            *before, last = found.path.split(".")
            if last[:1].isupper():
                return Instance(found)
            if before and last.startswith("from_"):
                return Instance(Name(found.modules, ".".join(before)))
        match function:
            case ast.Name(id=name):
                return self._annotated(self._returned.get(name))
            case ast.Attribute(value=value, attr=name):
                # Most values with a method of this name are containers.
                is_own = isinstance(value, ast.Name) and value.id == "self"
                if is_own or name not in _CONTAINERS_METHODS:
                    return self._annotated(self._returned.get(name))
        return None

    def _attribute(
        self, node: ast.Attribute, known: dict[str, Instance | None]
    ) -> Name | Instance | None:
        value = self._value_of(node.value, known)
        if value is None and isinstance(node.value, ast.Name) and node.value.id == "self":
            return self._annotated(self._annotations.get(node.attr))
        if isinstance(value, Instance):
            if node.attr not in value.own and not node.attr.startswith("__"):
                self.found.add(value.of.then(node.attr))
            return None
        if value is None:
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if is_private and _root(node) not in self._others:
                self.private.add(node.attr)
            return None
        if value.path.count("."):
            # An attribute of a constant.
            return None
        self.found.add(value.then(node.attr))
        return value.then(node.attr)


def _annotations(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The annotated attributes of a class."""
    return {
        part.target.id: part.annotation
        for part in _statements(node.body)
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _defined(tree: ast.AST) -> Iterator[str]:
    """What the tree defines, and the attributes that its classes set."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef():
                yield node.name
                yield from _members(node)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def _own_members(node: ast.ClassDef) -> Iterator[str]:
    """The attributes that a class defines: by its body, or first in its `__init__`."""
    yield from _bound_in(node.body)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for part in ast.walk(method):
                match part:
                    case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                        yield name
                    case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                        yield name


def _members(node: ast.ClassDef) -> Iterator[str]:
    """The attributes that a class and its instances get from its own body."""
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
    yield from _bound_in(node.body)


@cache
def _argparses() -> frozenset[str]:
    parser = argparse.ArgumentParser()
    return frozenset((*dir(parser), *vars(parser)))


# ------------------------------------------------------------------------------ what a vLLM has


@dataclass
class Installed:
    """A vLLM in a folder, read and not imported."""

    folder: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def lacks(self, names: Iterable[Name]) -> list[Name]:
        """Those of the names that are not there, sorted."""
        listed = sorted(set(names))
        private = [name.path for name in listed if not name.modules]
        there = self._private(private)
        return [
            name for name in listed if not (self._has(name) if name.modules else name.path in there)
        ]

    def _has(self, name: Name) -> bool:
        parts = name.path.split(".") if name.path else []
        return any(self._has_in(module, parts) for module in name.modules)

    def _has_in(self, module: str, parts: Sequence[str]) -> bool:
        if not parts:
            return self._tree(module) is not None
        first, *rest = parts
        if self._tree(f"{module}.{first}") is not None:
            return self._has_in(f"{module}.{first}", rest)
        found = self._definition(module, first)
        if found is None or not rest:
            return found is not None
        where, node = found
        if isinstance(node, ast.ClassDef):
            return self._has_member(where, node, rest[0])
        # A constant or a function, of whose attributes the tree says nothing.
        return True

    def _definition(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """What the name stands for, followed through imports, and the module of that."""
        tree = self._tree(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                source = _absolute(node, module, is_package=self._is_package(module))
                for alias in node.names:
                    if alias.name == "*":
                        found = self._definition(source, name)
                        if found is not None:
                            return found
                    elif name == (alias.asname or alias.name):
                        is_vllms = source.split(".")[0] == "vllm"
                        inside = self._definition(source, alias.name) if is_vllms else None
                        return inside or (source, node)
            elif name in _binds(node):
                return module, node
        return None

    def _has_member(self, module: str, node: ast.ClassDef, name: str) -> bool:
        if name in _members(node):
            return True
        for base in node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if not isinstance(base, ast.Name):
                continue
            where, found = self._definition(module, base.id) or (module, None)
            if isinstance(found, ast.ClassDef):
                if self._has_member(where, found, name):
                    return True
            elif isinstance(found, ast.ImportFrom) and _library_has(where, base.id, name):
                return True
        return False

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self.folder.joinpath(*module.split("."))
            files = [path.with_suffix(".py"), path / "__init__.py"]
            text = next((file.read_text("utf-8") for file in files if file.is_file()), None)
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _is_package(self, module: str) -> bool:
        return self.folder.joinpath(*module.split("."), "__init__.py").is_file()

    def _private(self, names: Sequence[str]) -> set[str]:
        """Those of the private names that any file of vLLM defines."""
        if not names:
            return set()
        any_name = "|".join(map(re.escape, names))
        definition = re.compile(
            rf"\bdef ({any_name})\(|\.({any_name})(?::[^=\n]*)? = |^ *({any_name})(?::| = )", re.M
        )
        found: set[str] = set()
        for file in (self.folder / "vllm").rglob("*.py"):
            for groups in definition.findall(file.read_text("utf-8", errors="replace")):
                found.update(filter(None, groups))
        return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and those in its conditions, but not in functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.stmt):
                    yield from _statements([part])
                elif isinstance(part, ast.ExceptHandler):
                    yield from _statements(part.body)


def _bound_in(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that these statements, and those in their conditions, bind."""
    for node in _statements(body):
        yield from _binds(node)


def _binds(node: ast.stmt) -> Iterator[str]:
    """The names that this statement binds itself."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ClassDef(name=name):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        case ast.Assign() | ast.AnnAssign():
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    keep = len(parents) - node.level + is_package
    return ".".join([*parents[:keep], *([node.module] if node.module else [])])


def _library_has(module: str, base: str, name: str) -> bool:
    """Whether a class of another library has the attribute; assumed where that is not Python's."""
    if module.split(".")[0] not in sys.stdlib_module_names:
        return True
    return hasattr(getattr(importlib.import_module(module), base, None), name)


# ------------------------------------------------------------------------------------ the page

HEAD = """# Names of vLLM

    python -m scripts.vllm_names                 # writes this page
    python -m scripts.vllm_names --check FOLDER  # prints what the vLLM in this folder lacks

vLLM promises compatibility for none of these names. The list has all imports of vLLM in Sterna's
code, and the attributes that it uses of vLLM's classes, as far as the syntax trees show the class
of a value. Of other values, private attributes alone are listed.

`tests/engine/test_vllm_names.py` compares the page with the code and with the installed vLLM. The
list may not grow beyond `MAX_NAMES` in `scripts/vllm_names.py`: a change that needs more of vLLM
raises it. [The next vLLM](next_vllm.md) is checked for the same names.
"""


def page(used: dict[str, set[Name]]) -> str:
    """The page, with the names of each file."""
    sections = [
        f"## {file}\n\n{''.join(_lines(names))}" for file, names in sorted(used.items()) if names
    ]
    return "\n".join([HEAD, f"**{len(every(used))} names.**\n", *sections])


def every(used: dict[str, set[Name]]) -> set[Name]:
    """All names, each once."""
    return set().union(*used.values())


def _lines(names: set[Name]) -> Iterator[str]:
    in_modules: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(dict)
    for name in sorted(names):
        first, _, rest = name.path.partition(".")
        attributes = in_modules[name.modules].setdefault(first, [])
        if rest:
            attributes.append(f"`{rest}`")
    for modules, paths in sorted(in_modules.items()):
        where = " or ".join(f"`{each}`" for each in modules) or "attributes of other values"
        listed = "; ".join(
            f"`{path}`" + (f" with {', '.join(attributes)}" if attributes else "")
            for path, attributes in paths.items()
            if path
        )
        yield f"- {where}: {listed}\n" if listed else f"- {where}\n"


def sources() -> dict[str, str]:
    """The code of `sterna`, by path."""
    return {
        path.relative_to(SOURCE).as_posix(): path.read_text("utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the status is 1 where names are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="a folder with a vLLM in it")
    folder: Path | None = parser.parse_args(arguments).check
    used = names_used(sources())
    if folder is None:
        PAGE.write_text(page(used), "utf-8")
        print(f"{len(every(used))} names in {PAGE}")
        return 0
    missing = Installed(folder).lacks(every(used))
    for name in missing:
        print(f"missing: {' or '.join(name.modules) or 'anywhere'}: {name.path}")
    print(f"{len(every(used)) - len(missing)} of {len(every(used))} names are in {folder}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
