"""Mutation run: what it plants, and that a test which fails is noticed."""

import textwrap
from pathlib import Path

import pytest

from bench.mutants import equivalents
from bench.mutants.__main__ import main
from bench.mutants.equivalents import Equivalent
from bench.mutants.operators import mutants, mutated
from bench.mutants.targets import ROOT, TARGETS, Target
from bench.mutants.trials import NoTestsError, Trial, run

CHANGES = {
    "return a < b": ["a < b -> a <= b"],
    "return a == b": ["a == b -> a != b"],
    "return a is None": ["a is None -> a is not None"],
    "return a and b": ["a and b -> b", "a and b -> a"],
    "return not a": ["not a -> a"],
    "return a + b": ["a + b -> a - b"],
    "return -a": ["-a -> a"],
    "return a or 3": ["a or 3 -> 3", "a or 3 -> a", "3 -> 4"],
    "return f(a=True)": ["True -> False"],
    "return max(a, b)": ["max(a, b) -> b", "max(a, b) -> a"],
    "return min(a, key=b)": ["min(a, key=b) -> max(a, key=b)"],
    "return sorted(a)": ["sorted(a) -> list(a)"],
    "return structs.replace(a, b=b)": ["structs.replace(a, b=b) -> structs.replace(a)"],
    "return a if b else c": ["a if b else c -> a", "a if b else c -> c"],
    "return [x for x in a if x]": ["if x -> without"],
    "return f([a, b])": ["[a, b] -> [b]", "[a, b] -> [a]"],
    "return isinstance(a, B | C)": ["B | C -> B", "B | C -> C"],
    "if a: f()": ["a -> not a", "deleted"],
    "a.b = c": ["deleted"],
    "a += b": ["deleted", "a += b -> a -= b"],
    "raise ValueError(f'{a + 1}')": ["deleted"],
    "match a:\n  case B() | C() if d: f()\n  case _: g()": [
        "case B() | C() -> without",
        "case _ -> without",
        "B() | C() -> C()",
        "B() | C() -> B()",
        "if d -> without",
        "deleted",
        "deleted",
    ],
    "match a:\n  case 1 as b: f()\n  case _: assert_never(a)": [
        "case 1 as b -> without",
        "1 -> 2",
        "deleted",
    ],
    # Left alone.
    "assert a < 1": [],
    "return f'{a + 1}'": [],
    "a: int | None": [],
    "d = b": [],
}
"""Bodies of a function, with all that is changed in them."""


@pytest.mark.parametrize(("body", "changes"), CHANGES.items(), ids=CHANGES)
def test_each_operator_plants_its_mistakes(body: str, changes: list[str]) -> None:
    source = f"def f(a):\n{textwrap.indent(body, '  ')}\n"
    assert sorted(each.change for each in mutants(source)) == sorted(changes)


@pytest.mark.parametrize(
    ("returns", "changes"),
    {
        "bool": ["g(a) -> not g(a)"],
        "list[Effect]": ["g(a) -> []"],
        "tuple[int, ...]": ["g(a) -> ()"],
        "int | None": ["g(a) -> None"],
        "int": [],
    }.items(),
)
def test_another_value_of_the_same_type_is_returned(returns: str, changes: list[str]) -> None:
    source = f"def f(a) -> {returns}:\n  return g(a)\n"
    assert [each.change for each in mutants(source)] == changes


def test_a_number_that_the_module_names_is_a_setting() -> None:
    source = "TIMEOUT_S = 3.0\nclass A:\n  count: int = 0\n"
    (mutant,) = mutants(source)
    assert (mutant.function, mutant.line, mutant.change) == ("A", "count: int = 0", "0 -> 1")
    assert mutated(source, mutant) == "TIMEOUT_S = 3.0\n\nclass A:\n    count: int = 1"


def test_a_mutant_keeps_its_name_when_other_lines_change() -> None:
    before = mutants("def f(a):\n  a += 1\n  a += 1\n")
    after = mutants("# More above.\nX = 1\ndef f(a):\n  g()\n  a += 1\n  a += 1\n")
    names = {(each.function, each.line, each.change) for each in before}
    assert len(names) == len(before) == 6
    assert names < {(each.function, each.line, each.change) for each in after}


MODULE = "def larger(a, b):\n    return a if a > b else b\n"
TESTS = "from counted import larger\n\ndef test_of_two():\n    assert larger(2, 1) == 2\n"


def test_a_mutant_is_found_by_a_test_that_fails_and_survives_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counted.py").write_text(MODULE)
    (tmp_path / "test_counted.py").write_text(TESTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    stages, limits_s = (("test_counted.py",),), (60.0,)
    left, right, _ = mutants(MODULE)
    assert (left.change, right.change) == ("a if a > b else b -> a", "a if a > b else b -> b")
    found_by = [
        run(Trial("counted", mutated(MODULE, each), stages, limits_s, str(tmp_path))).found_by
        for each in (left, right)
    ]
    assert found_by == [None, "test_counted.py::test_of_two"]
    assert (tmp_path / "counted.py").read_text() == MODULE


@pytest.mark.slow
def test_a_mutant_that_never_ends_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_counted.py").write_text("import counted\n\ndef test(): counted.f()\n")
    (tmp_path / "counted.py").write_text("def f(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    endless = Trial(
        "counted", "def f():\n  while True: pass\n", (("test_counted.py",),), (0.2,), str(tmp_path)
    )
    assert run(endless).found_by in ("ended by SIGXCPU", "ended by SIGKILL")


def test_a_run_without_tests_is_no_survivor(tmp_path: Path) -> None:
    with pytest.raises(NoTestsError):
        run(Trial("counted", None, ((str(tmp_path),),), (60.0,), str(tmp_path)))


@pytest.mark.parametrize("target", TARGETS, ids=lambda each: each.module)
def test_all_modules_and_tests_of_the_table_exist(target: Target) -> None:
    paths = [each.split("::")[0] for stage in target.stages for each in stage]
    assert [each for each in paths if not (ROOT / each).exists()] == []
    assert target.path.exists()


@pytest.mark.parametrize("name", ["lease", "supervisor.lease", "sterna.supervisor.lease"])
def test_a_module_is_chosen_by_the_end_of_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert {line.split(":")[0] for line in lines} == {"sterna.supervisor.lease"}


def test_equivalent_mutants_are_of_modules_of_the_table_and_have_reasons() -> None:
    listed = equivalents.load()
    assert set(listed) <= {each.module for each in TARGETS}
    assert all(entry.reason for entries in listed.values() for entry in entries)


def test_an_entry_that_fits_no_mutant_is_named() -> None:
    found = mutants("def f(a):\n  return a < 1\n")
    entry = Equivalent("f", "return a < 1", ("a < 1 -> a <= 1", "a < 1 -> a > 1"), "why")
    assert [entry.names(each) for each in found] == [True, False]
    assert equivalents.unmatched((entry,), found) == ["f: return a < 1: a < 1 -> a > 1"]
