"""The model of the handshake has the names that the code has, and what it says holds.

The checker itself is spin, which not every machine has: `make model-check` runs all of it.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import UnionType

import pytest

from bench.simulation.model_check import BREAKS, MODEL, MODELS, SHORT, Check, explore, missing_tool
from sterna.migration.destination import DestinationState
from sterna.migration.messages import Effect, Event, Message
from sterna.migration.source import SourceState
from tests.needed_tools import needs

needs_spin = needs(missing_tool())

NOT_MODELLED = {
    # Effects that take place in the step of the machine that returns them.
    "Send": "`send` puts the message into `net`",
    "CopyBlocks": "`copy_blocks` sets the stage's bit in `copying`",
    "StopCopying": "`stop_copying` clears `copying`",
    "Resume": "`keep_drained`: the request runs or queues again",
    "Release": "`release`",
    "AbortDrained": "`keep_drained`: the request is gone",
    "AbortRequest": "`abort_request_at_a`, `abort_request_at_b`",
    "Ended": "a state that is settled",
    # Events that are bits or steps rather than outcomes that wait.
    "Received": "`take` of a message, and the `..._on_...` of its kind",
    "StageReceived": "a bit in `received`",
    "StageFailed": "a bit in `failed`",
    "CopyFailed": "a bit in `copy_failed`",
    "RequestEnded": "`hint`",
    "ClientAborted": "`source_on_client_aborted`, `destination_on_client_aborted`",
    "PeerDead": "`source_on_peer_dead`, `destination_on_peer_dead`",
    "Cancelled": "`source_on_cancelled`, `destination_on_cancelled`",
    "KeepPrefix": "a prefix that moves alone is to the machines a request that leaves no batch",
    "Tick": "`clock`: deadlines have no length here, only an order",
}
"""Effects and events of the code that are no names in the model, and what stands for them there."""

CASES_OF_ONE_EVENT = {"InspectedGone": "Inspected", "DrainRefusedTooManyBlocks": "DrainRefused"}
"""Names of the model that tell cases of an event apart."""


def model_names(kind: str) -> set[str]:
    """The names that the model declares by `mtype:kind = {...}`."""
    text = "\n".join(path.read_text() for path in sorted(MODELS.glob("*.pml")))
    (names,) = re.findall(rf"^mtype:{kind} = \{{(.*?)\}};", text, re.MULTILINE | re.DOTALL)
    return {name.strip() for name in names.split(",")}


def code_names(union: UnionType) -> set[str]:
    return {each.__name__ for each in union.__args__}


def test_the_model_has_the_messages_of_the_wire() -> None:
    assert model_names("message") == code_names(Message)


@pytest.mark.parametrize(
    ("kind", "states"),
    [("source_state", SourceState), ("destination_state", DestinationState)],
)
def test_the_model_has_the_states_of_the_machines(kind: str, states: type[Enum]) -> None:
    prefix = kind.removesuffix("_state").upper()
    assert model_names(kind) == {f"{prefix}_{state.name}" for state in states}


def test_the_model_has_the_effects_and_events_or_says_what_stands_for_them() -> None:
    modelled = {CASES_OF_ONE_EVENT.get(each, each) for each in model_names("event")}
    modelled |= model_names("effect")
    assert modelled | NOT_MODELLED.keys() == code_names(Effect) | code_names(Event)
    assert not modelled & NOT_MODELLED.keys()


def test_what_stands_for_an_effect_or_event_is_in_the_model() -> None:
    text = "\n".join(path.read_text() for path in MODELS.glob("*.pml"))
    for meaning in NOT_MODELLED.values():
        for name in re.findall(r"`([a-z_]+)`", meaning):
            assert re.search(rf"\b{name}\b", text), name


def test_every_rule_that_the_model_can_leave_out_is_tried() -> None:
    text = "\n".join(path.read_text() for path in MODELS.glob("*.pml"))
    assert set(re.findall(r"BREAK_([A-Z_]+)", text)) == {each.broken for each in BREAKS}


@needs_spin
@pytest.mark.parametrize("check", SHORT, ids=lambda check: check.kind)
def test_the_protocol_holds_in_small_bounds(check: Check) -> None:
    explored = explore(check)
    assert explored.violated is None
    assert explored.num_states > 10_000


def num_owners(state: dict[str, str]) -> int:
    """How many instances may step the request."""
    at_a = state["a_is_alive"] == "1" and state["at_a"] in ("RUNNING", "QUEUING")
    at_b = state["b_is_alive"] == "1" and state["at_b"] == "1"
    return at_a + at_b + (state["at_c"] == "1")


FOUND_AS: dict[str, Callable[[str, dict[str, str]], bool]] = {
    "freed while it is sent": lambda said, _: "(copying==0)" in said,
    "two owners": lambda said, at: "assertion violated  !(" in said and num_owners(at) == 2,
    "blocks not in place": lambda said, _: "(is_in_place&must_be_copied)" in said,
    "illegal event": lambda said, _: "<s_stage)" in said,
    "restarted while it runs": lambda said, at: (
        "assertion violated  !(((a_is_alive" in said and num_owners({**at, "at_c": "0"}) == 1
    ),
    "drained without end": lambda said, at: said == CYCLE and at["at_a"] == "DRAINED",
    "runs without a client": lambda said, at: (
        said == CYCLE and at["client_gone"] == "1" and num_owners(at) == 1
    ),
    "the destination waits without end": lambda said, at: (
        said == CYCLE and at["destination"] != "DESTINATION_OVER"
    ),
    "no instance has the request": lambda said, at: (
        said == CYCLE and {at["is_ended"], at["client_gone"]} == {"0"} and num_owners(at) == 0
    ),
}
"""What docs/internals/model.md says that a broken protocol is found as: by what spin says, and the
state in which its example ends."""

CYCLE = "acceptance cycle"
"""What spin says of an example that never comes to a good end."""

PAGE = (MODELS.parent / "docs" / "internals" / "model.md").read_text("utf-8")
FOUND = dict(re.findall(r"^\| ([A-Z_]+)\b.*\| (.*) \|$", PAGE, re.MULTILINE))


def test_the_page_says_of_every_rule_as_what_it_is_missed() -> None:
    assert FOUND.keys() == {each.broken for each in BREAKS}
    assert set(FOUND.values()) == FOUND_AS.keys()


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("check", BREAKS, ids=lambda check: check.name)
def test_a_rule_that_is_left_out_is_missed(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The checker's folder has the example.
    monkeypatch.setattr(
        tempfile, "TemporaryDirectory", lambda **_: contextlib.nullcontext(str(tmp_path))
    )
    said = explore(check).violated
    assert said is not None
    assert check.broken is not None
    replay = ["spin", "-t", *check.defines(), MODEL]
    done = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True, check=True)
    state = dict(re.findall(r"^\s+(\w+) = (\w+)$", done.stdout, re.MULTILINE))
    assert FOUND_AS[FOUND[check.broken]](said, state), (said, state)
