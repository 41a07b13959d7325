"""docs/internals/failure_tests.md: each promise of the operations pages names tests, and each test
is run by the target that the page names for it; and tables of these pages that follow the code."""

import re

from sterna.messages.reasons import MoveCause
from sterna.migration.messages import Reason
from tests.collected import ROOT, Function, Selection, selection_of

DOCS = ROOT / "docs"
PAGE = (DOCS / "internals" / "failure_tests.md").read_text("utf-8")
PROMISES = (DOCS / "operations" / "failures.md").read_text("utf-8")
CLAIM = re.compile(r"`((?:process|emulated)/test_\w+\.py(?: -k \w+)?)`")


def target_of(path: str) -> str:
    """The target that runs a file, by the page's own rule."""
    rule = re.search(
        r"those in `(\S+)`, `(\S+)` and `(\S+)` run with\s+`make (\S+)`, "
        r"the others with `make (\S+)`",
        PAGE,
    )
    assert rule is not None
    *folders, target, otherwise = rule.groups()
    return target if path.startswith(tuple(f"{each}/" for each in folders)) else otherwise


def run_by_target(path: str, rest: str = "") -> list[Function]:
    return selection_of(f'make {target_of(path)} ARGS="{path}{rest}"').functions()


def rows_of_what_dies(page: str) -> list[str]:
    """The rows of the first table under that heading."""
    section = page.partition("## What happens when ... dies")[2].partition("\n## ")[0]
    return section.partition("|---")[2].partition("\n\n")[0].splitlines()[1:]


def test_what_dies_on_the_page_for_users_has_tests_on_this_one() -> None:
    def names(page: str) -> list[str]:
        return [row.split(" | ")[0] for row in rows_of_what_dies(page)]

    assert names(PAGE) == names(PROMISES)


def test_every_row_of_what_dies_names_tests() -> None:
    rows = rows_of_what_dies(PAGE)
    assert len(rows) >= 12
    for row in rows:
        claims = CLAIM.findall(row.split("|")[-2])
        assert claims, f"no test is named: {row}"


def test_every_test_of_a_server_that_is_named_is_run_by_its_target() -> None:
    for claim in CLAIM.findall(PAGE):
        path, space, rest = f"tests/serve/{claim}".partition(" ")
        assert run_by_target(path, space + rest), f"{target_of(path)} does not run {claim}"


def test_every_file_that_is_named_is_run_by_its_target_as_a_whole() -> None:
    paths = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(paths) >= 12
    for path in paths:
        all_of_it = Selection((path,), keywords="", marks="").functions()
        assert run_by_target(path) == all_of_it, f"{target_of(path)} does not run all of {path}"


def test_commands_of_the_page_run_tests() -> None:
    commands = re.findall(r"`(make [\w-]*test[\w-]* ARGS=[^`]*)`", PAGE)
    assert commands
    for command in commands:
        assert selection_of(command).functions(), f"this runs no test: {command}"


def test_no_test_is_named_in_another_way() -> None:
    """Else nobody would look at it here."""
    named = re.findall(r"test_\w+\.py", PAGE)
    known = [*CLAIM.findall(PAGE), *re.findall(r"`(tests/[\w/]+\.py)`", PAGE)]
    in_commands = re.findall(r"ARGS=\"tests/\S+\.py", PAGE)
    assert len(named) == len(known) + len(in_commands)


def test_the_page_of_explanations_has_every_reason_why_a_request_did_not_move() -> None:
    page = (DOCS / "operations" / "explain.md").read_text("utf-8")
    section = page.partition("### Why a request did not move\n")[2]
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert found == [(each.name.lower(), each.value) for each in Reason]


def test_the_page_of_explanations_has_every_cause_of_a_move() -> None:
    page = (DOCS / "operations" / "explain.md").read_text("utf-8")
    (causes,) = re.findall(r"^\| `moved` \|.*`cause` \((.*?)\)", page, re.MULTILINE)
    assert causes.split(", ") == [f"`{each.value}`" for each in MoveCause]
