"""Every state x event pair of both machines, against the tables of docs/migration_protocol.md.

A row says what an event leads to and which deadlines it sets, renews or clears; what stands under
"Only renew" does that alone; what stands under "Ignored" changes nothing; and whatever is not named
is illegal: it raises ProtocolError and changes nothing.
"""

import re
from pathlib import Path

import pytest

from sterna.errors import ProtocolError
from sterna.migration.destination import DestinationState, MigrationDestination
from sterna.migration.messages import (
    Abort,
    Adopted,
    AdoptFailed,
    Drained,
    DrainRefused,
    Event,
    Reason,
    Received,
    Released,
    ReservationFreed,
    Tick,
)
from sterna.migration.source import MigrationSource, SourceState
from tests.migration.machines import (
    DESTINATION_ANOTHER_RESERVATION,
    DESTINATION_EVENTS,
    DESTINATION_STATES,
    LATER_S,
    OTHER,
    SOURCE_ANOTHER_RESERVATION,
    SOURCE_EVENTS,
    SOURCE_STATES,
    START_S,
    M,
    aborted,
    blocks_reserved,
    changes,
    commit,
    commit_query,
    committed,
    deadlines,
    destination_in,
    forwarded_abort,
    inspected,
    name,
    reserve,
    reserved,
    snapshot,
    source_in,
    stage_copied,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "migration_protocol.md"
IGNORED = "ignored"
ILLEGAL = "illegal"

Cell = tuple[str, str, str] | str
"""(state, effects, deadlines); "renew" and a deadline, if that is all; IGNORED or ILLEGAL."""


def read_tables(side: str) -> dict[str, dict[str, Cell]]:
    """The document's tables of one side: state -> event -> what it says."""
    tables: dict[str, dict[str, Cell]] = {}
    sections = re.split(r"^### ", DOCUMENT.read_text(), flags=re.MULTILINE)
    for section in sections:
        heading, _, body = section.partition("\n")
        if not heading.startswith(f"{side}: "):
            continue
        cells: dict[str, Cell] = {}
        for line in body.splitlines():
            if line.startswith("| ") and not line.startswith("| event"):
                event, *cell = (part.strip() for part in line.strip("| ").split(" | "))
                state, effects, deadlines_changed = cell
                cells[event] = (state, effects, deadlines_changed)
            elif match := re.fullmatch(r"(?:Only (renew \w+)|Ignored): (.+)\.", line):
                cells.update(dict.fromkeys(match[2].split("; "), match[1] or IGNORED))
        tables[heading.removeprefix(f"{side}: ")] = cells
    return tables


SOURCE_TABLES = read_tables("source")
DESTINATION_TABLES = read_tables("destination")
SOURCE_PAIRS = [(state, event) for state in ("NEW", *SOURCE_STATES) for event in SOURCE_EVENTS]
DESTINATION_PAIRS = [(state, event) for state in DESTINATION_STATES for event in DESTINATION_EVENTS]


def outcome(machine: MigrationSource | MigrationDestination, event: Event, now_s: float) -> Cell:
    """What the event does to the machine, in the tables' words."""
    before, memory, waits = dict(vars(machine)), snapshot(machine), deadlines(machine)
    state = machine.state
    try:
        effects = machine.on_event(event, now_s)
    except ProtocolError:
        assert vars(machine) == before
        return ILLEGAL
    changed = changes(waits, deadlines(machine), now_s)
    if effects:
        return machine.state.name, ", ".join(map(name, effects)), changed
    if snapshot(machine) == memory:
        return IGNORED if changed == "—" else changed
    remembered = ", remembered" if machine.state is state else ""
    return f"{machine.state.name}{remembered}", "—", changed


@pytest.mark.parametrize(("state", "event"), SOURCE_PAIRS)
def test_source_does_with_each_event_in_each_state_what_the_table_says(
    state: str, event: str
) -> None:
    happened, after_s = SOURCE_EVENTS[event]
    said = SOURCE_TABLES[state].get(event, ILLEGAL)
    assert outcome(source_in(state), happened, START_S + after_s) == said


@pytest.mark.parametrize(("state", "event"), DESTINATION_PAIRS)
def test_destination_does_with_each_event_in_each_state_what_the_table_says(
    state: str, event: str
) -> None:
    happened, after_s = DESTINATION_EVENTS[event]
    said = DESTINATION_TABLES[state].get(event, ILLEGAL)
    assert outcome(destination_in(state), happened, START_S + after_s) == said


def test_tables_have_every_state_and_no_event_that_is_not_tried() -> None:
    assert set(SOURCE_TABLES) == {"NEW", *SOURCE_STATES}
    assert set(DESTINATION_TABLES) == set(DESTINATION_STATES)
    assert {s.split(",")[0] for s in SOURCE_TABLES} == {state.name for state in SourceState}
    assert {s.split(",")[0] for s in DESTINATION_TABLES} == {s.name for s in DestinationState}
    assert {e for table in SOURCE_TABLES.values() for e in table} <= set(SOURCE_EVENTS)
    assert {e for t in DESTINATION_TABLES.values() for e in t} <= set(DESTINATION_EVENTS)


SOURCE_STATES_WITH_RESERVATION = [s for s in SOURCE_STATES if not s.endswith("first stage")]


@pytest.mark.parametrize("state", SOURCE_STATES_WITH_RESERVATION)
@pytest.mark.parametrize("event", SOURCE_ANOTHER_RESERVATION, ids=repr)
def test_source_ignores_what_is_said_of_another_reservation(state: str, event: Event) -> None:
    assert outcome(source_in(state), event, START_S + LATER_S) == IGNORED


@pytest.mark.parametrize("state", [s for s in DESTINATION_STATES if s not in ("NEW", "OVER")])
@pytest.mark.parametrize("event", DESTINATION_ANOTHER_RESERVATION, ids=repr)
def test_destination_disowns_what_was_meant_for_another_reservation(
    state: str, event: Received
) -> None:
    machine = destination_in(state)
    before = dict(vars(machine))
    (effect,) = machine.on_event(event, START_S + LATER_S)
    assert effect.message == aborted(Reason.UNKNOWN_MIGRATION, OTHER).message
    assert vars(machine) == before


OF_THE_DESTINATION: list[Event] = [
    reserve(1),
    commit(1, 9),
    commit_query(),
    forwarded_abort(),
    Received(Abort(M, Reason.CANCELLED)),
    Received(Released(M)),
    blocks_reserved(1),
    Adopted(),
    AdoptFailed(Reason.UNSUPPORTED),
    ReservationFreed(),
]
OF_THE_SOURCE: list[Event] = [
    reserved(1),
    stage_copied(1),
    committed(),
    aborted(Reason.CANCELLED),
    inspected(9),
    Drained(9, b""),
    DrainRefused(None),
]


@pytest.mark.parametrize("state", ["NEW", *SOURCE_STATES])
@pytest.mark.parametrize("event", OF_THE_DESTINATION, ids=repr)
def test_source_takes_nothing_that_is_the_destinations(state: str, event: Event) -> None:
    assert outcome(source_in(state), event, START_S + LATER_S) == ILLEGAL


@pytest.mark.parametrize("state", DESTINATION_STATES)
@pytest.mark.parametrize("event", OF_THE_SOURCE, ids=repr)
def test_destination_takes_nothing_that_is_the_sources(state: str, event: Event) -> None:
    assert outcome(destination_in(state), event, START_S + LATER_S) == ILLEGAL


@pytest.mark.parametrize("state", SOURCE_STATES)
def test_source_cannot_be_started_twice(state: str) -> None:
    machine = source_in(state)
    before = dict(vars(machine))
    with pytest.raises(ProtocolError):
        machine.start(START_S + LATER_S)
    assert vars(machine) == before


@pytest.mark.parametrize("state", ["NEW", *SOURCE_STATES])
def test_source_has_something_to_do_at_its_deadline(state: str) -> None:
    """A deadline at which nothing happens would wake the interpreter over and over."""
    machine = source_in(state)
    deadline_s = machine.next_deadline_s
    if deadline_s is not None:
        assert machine.on_event(Tick(), deadline_s) != []
        assert machine.next_deadline_s is None or machine.next_deadline_s > deadline_s


@pytest.mark.parametrize("state", DESTINATION_STATES)
def test_destination_has_something_to_do_at_its_deadline(state: str) -> None:
    machine = destination_in(state)
    deadline_s = machine.next_deadline_s
    if deadline_s is not None:
        before = machine.state
        effects = machine.on_event(Tick(), deadline_s)
        assert effects != [] or machine.state is not before
        assert machine.next_deadline_s is None or machine.next_deadline_s > deadline_s
