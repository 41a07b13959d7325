"""Mutants of a module: its source with one small mistake each. Pure.

The operators are the usual ones: a boundary of a comparison, an operand of `and`, `or`, `|`, `min`
or `max` left out, a sign, a number, a deleted statement, a `case` or one of its alternatives left
out, another return value. Where one mutant fails every test that another one fails, only the
harder one to find is made: `or` in the place of `and` differs from the original wherever one of the
operands alone does.

Left alone: strings, annotations, decorators, assertions, what a `raise` says, and numbers that a
module gives a name to, which are settings.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
}

_CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "ceil": "floor",
    "floor": "ceil",
}

_OF_RETURN = {
    r"(list|Iterable|Sequence)\[.*": "[]",
    r"tuple\[.*\.\.\.\]": "()",
    r"dict\[.*": "{}",
    r".*\| None": "None",
}
"""Another value for functions of these types."""

_OWN_OPERATORS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Constant)
_MAX_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one mistake.

    Attributes:
        function: qualified name of the function or class that has it; "" for the module itself.
        line: the text of the line where the changed code begins.
        change: what was there and what is there instead. With the two above it names the mutant
            for as long as that line stays as it is; a second one of the same name in the same
            function has a number behind it.
        line_number: for people; it names nothing.
        number: of the edit, for `mutated`.
    """

    function: str
    line: str
    change: str
    line_number: int
    number: int


@dataclass(frozen=True, slots=True)
class _Edit:
    """A place in the syntax tree and what comes there; None deletes.

    Attributes:
        unit: the function around it, or else the statement.
        at: the node that says the line.
    """

    unit: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    new: ast.AST | None
    function: str
    at: ast.AST
    said: str


@dataclass(frozen=True, slots=True)
class _Place:
    """What surrounds a node."""

    unit: ast.AST
    function: str = ""
    is_function: bool = False
    returns: str = ""
    is_init: bool = False
    rebound: frozenset[str] = frozenset()
    is_setting: bool = False


def mutants(source: str) -> list[Mutant]:
    """All mutants of this module, in the order of its lines; the same ones each time."""
    lines = source.splitlines()
    found: dict[tuple[str, str], Mutant] = {}
    names: Counter[tuple[str, str, str]] = Counter()
    for number, edit in enumerate(_ordered_edits(ast.parse(source))):
        mutated_unit = _with(edit, edit.unit)
        if (edit.function, mutated_unit) in found or mutated_unit == ast.unparse(edit.unit):
            continue
        line_number = _line_number(edit.at)
        line = lines[line_number - 1].strip()
        name = (edit.function, line, edit.said)
        names[name] += 1
        said = edit.said if names[name] == 1 else f"{edit.said} ({names[name]})"
        found[edit.function, mutated_unit] = Mutant(edit.function, line, said, line_number, number)
    return list(found.values())


def mutated(source: str, mutant: Mutant) -> str:
    """The source with this mistake, which `mutants` found in it; without its comments."""
    tree = ast.parse(source)
    return _with(_ordered_edits(tree)[mutant.number], tree)


def _ordered_edits(tree: ast.Module) -> list[_Edit]:
    return sorted(_edits(tree, _Place(tree)), key=lambda edit: _line_number(edit.at))


def _with(edit: _Edit, shown: ast.AST) -> str:
    """The text of this part of the tree with the edit."""
    before = getattr(edit.parent, edit.field)
    after: object = edit.new
    if edit.index is not None:
        after = [*before[: edit.index], *_some(edit.new), *before[edit.index + 1 :]]
    setattr(edit.parent, edit.field, after)
    text = ast.unparse(shown)
    setattr(edit.parent, edit.field, before)
    return text


def _some(node: ast.AST | None) -> list[ast.AST]:
    return [] if node is None else [node]


def _line_number(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


# ------------------------------------------------------------------------- walk of the syntax tree


def _edits(parent: ast.AST, place: _Place) -> Iterator[_Edit]:
    """The edits of all nodes below this one."""
    for field, value in ast.iter_fields(parent):
        if _is_left_alone(parent, field):
            continue
        children = value if isinstance(value, list) else [value]
        for index, node in enumerate(children):
            if not isinstance(node, ast.AST):
                continue
            inner = _place_of(node, place)
            at = node if hasattr(node, "lineno") else parent
            for new, said in _replacements(node, parent, field, inner):
                where = index if isinstance(value, list) else None
                yield _Edit(inner.unit, parent, field, where, new, inner.function, at, said)
            yield from _own_edits(node, inner, at)
            yield from _edits(node, inner)


def _is_left_alone(parent: ast.AST, field: str) -> bool:
    match parent:
        case ast.Assert() | ast.Raise() | ast.JoinedStr():
            return True
        case ast.keyword(arg="strict"):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return field not in ("args", "body")
        case ast.ClassDef():
            return field != "body"
        case ast.AnnAssign() | ast.arg():
            return field == "annotation"
        case ast.ExceptHandler():
            return field == "type"
        case ast.match_case():
            # `_own_edits` and the alternatives of a pattern.
            return False
        case _:
            return False


def _place_of(node: ast.AST, place: _Place) -> _Place:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _Place(
                node,
                function=f"{place.function}.{node.name}".lstrip("."),
                is_function=True,
                returns="" if node.returns is None else ast.unparse(node.returns).strip("'"),
                is_init=node.name in ("__init__", "__post_init__"),
                rebound=_rebound(node),
            )
        case ast.ClassDef():
            return _Place(node, function=f"{place.function}.{node.name}".lstrip("."))
        case ast.stmt() if not place.is_function:
            is_setting = not place.function and isinstance(node, ast.Assign | ast.AnnAssign)
            return replace(place, unit=node, is_setting=is_setting)
        case _:
            return place


def _rebound(function: ast.AST) -> frozenset[str]:
    """Names of locals that are bound in more than one place."""
    bound = Counter(
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return frozenset(name for name, times in bound.items() if times > 1 or name in arguments)


# -------------------------------------------------------------------------------------- operators


def _replacements(
    node: ast.AST, parent: ast.AST, field: str, place: _Place
) -> Iterator[tuple[ast.AST | None, str]]:
    """What may come in the place of this node, each with the words for it."""
    if isinstance(node, ast.stmt):
        if _may_be_deleted(node, place):
            yield ast.Pass(), "deleted"
        return
    if field == "test" and isinstance(parent, ast.If | ast.While):
        yield from _negated(node)
    if field == "value" and isinstance(parent, ast.Return):
        yield from _returned(node, place)
    for new in _expressions(node, place):
        yield new, _said(node, new)


def _may_be_deleted(node: ast.stmt, place: _Place) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):
            return False
        case _ if _is_assertion(node):
            return False
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Raise():
            return True
        case ast.Continue() | ast.Break() | ast.Return(value=None):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return not place.is_init
        case ast.AnnAssign(target=ast.Attribute() | ast.Subscript(), value=ast.expr()):
            return not place.is_init
        case ast.Assign(targets=[ast.Name(id=name)]):
            return place.is_function and name in place.rebound
        case _:
            return False


def _is_assertion(node: ast.stmt) -> bool:
    match node:
        case ast.Assert() | ast.Expr(ast.Call(ast.Name("assert_never"))):
            return True
        case _:
            return False


def _negated(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.expr) and not isinstance(node, _OWN_OPERATORS):
        new = ast.UnaryOp(ast.Not(), node)
        yield new, _said(node, new)


def _returned(node: ast.AST, place: _Place) -> Iterator[tuple[ast.AST, str]]:
    if not isinstance(node, ast.expr) or isinstance(node, _OWN_OPERATORS):
        return
    if place.returns == "bool":
        yield from _negated(node)
    for pattern, other in _OF_RETURN.items():
        if re.fullmatch(pattern, place.returns, re.DOTALL):
            new = ast.parse(other, mode="eval").body
            yield new, _said(node, new)
            return


def _expressions(node: ast.AST, place: _Place) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                other = _COMPARISONS[type(op)]()
                yield ast.Compare(left, [*ops[:index], other, *ops[index + 1 :]], comparators)
        case ast.BoolOp(op, values):
            for others in _each_left_out(values):
                yield others[0] if len(others) == 1 else ast.BoolOp(op, others)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse
        case ast.BinOp(left, ast.BitOr(), right) if place.is_function:
            yield left
            yield right
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            if not _is_text_or_list(left) and not _is_text_or_list(right):
                yield ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value) if not place.is_setting:
            yield ast.Constant(value + 1)
        case ast.List(elements, ast.Load()) if place.is_function:
            for others in _each_left_out(elements):
                yield ast.List(others, ast.Load())
        case ast.Call():
            yield from _calls(node)
        case ast.MatchOr(patterns):
            for some in _each_left_out(patterns):
                yield some[0] if len(some) == 1 else ast.MatchOr(some)
        case _:
            return


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else _name(node.func)
    if called in ("min", "max") and len(node.args) > 1:
        for others in _each_left_out(node.args):
            if len(others) == 1 and not node.keywords:
                yield others[0]
            elif len(others) > 1:
                yield ast.Call(node.func, others, node.keywords)
    elif called == "sorted":
        yield ast.Call(ast.Name("list", ast.Load()), node.args, [])
    elif called in _CALLS:
        other = _CALLS[called]
        if isinstance(node.func, ast.Attribute):
            yield ast.Call(ast.Attribute(node.func.value, other), node.args, node.keywords)
        else:
            yield ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords)
    elif called == "replace":
        for keywords in _each_left_out(node.keywords):
            yield ast.Call(node.func, node.args, keywords)


def _own_edits(node: ast.AST, place: _Place, at: ast.AST) -> Iterator[_Edit]:
    """Edits of a node in which a part is left out that is no expression."""
    match node:
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            new = _ARITHMETIC[type(op)]()
            said = _said(node, ast.AugAssign(node.target, new, node.value))
            yield _Edit(place.unit, node, "op", None, new, place.function, at, said)
        case ast.comprehension(ifs=ifs):
            for index, each in enumerate(ifs):
                said = f"if {_text(each)} -> without"
                yield _Edit(place.unit, node, "ifs", index, None, place.function, each, said)
        case ast.Match(cases=cases) if len(cases) > 1:
            for index, case in enumerate(cases):
                if all(map(_is_assertion, case.body)):
                    continue
                said = f"case {_text(case.pattern)} -> without"
                yield _Edit(
                    place.unit, node, "cases", index, None, place.function, case.pattern, said
                )
        case ast.match_case(guard=ast.expr() as guard):
            said = f"if {_text(guard)} -> without"
            yield _Edit(place.unit, node, "guard", None, None, place.function, guard, said)
        case _:
            return


def _each_left_out(nodes: list[Node]) -> Iterator[list[Node]]:
    for index in range(len(nodes)):
        yield [*nodes[:index], *nodes[index + 1 :]]


def _is_text_or_list(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _said(old: ast.AST, new: ast.AST) -> str:
    return f"{_text(old)} -> {_text(new)}"


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
