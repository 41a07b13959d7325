"""Calls that may change an engine's weights: engines that got the same ones can exchange KV."""

import pytest

from sterna.engine.vllm.weight_updates import WeightUpdates

UPDATE = ("collective_rpc", "update_weights", b"call 7")
FINISH = ("collective_rpc", "finish_weight_update", b"call 8")
RESET = ("reset_prefix_cache", False, b"call 9")

Call = tuple[str, object, bytes]


def label(*calls: Call, failed: Call | None = None) -> str:
    """The label of an engine that got these calls; this one of them failed."""
    updates = WeightUpdates()
    for method, argument, payload in calls:
        is_done = (method, argument, payload) != failed
        updates.on_call(method, (argument,), payload, is_done=is_done)
    return updates.label


def test_an_engine_whose_weights_are_those_of_its_files_has_no_label() -> None:
    assert label() == label(RESET) == ""


@pytest.mark.parametrize(
    "call",
    [
        ("collective_rpc", "get_model_inspection", b"call 7"),
        ("set_weight_version", "two", b"call 7"),
    ],
)
def test_calls_that_leave_the_weights_leave_the_label(call: Call) -> None:
    assert label(UPDATE, call) == label(UPDATE)


def test_engines_that_got_the_same_calls_in_the_same_order_have_the_same_label() -> None:
    labels = [label(UPDATE), label(FINISH), label(UPDATE, FINISH), label(FINISH, UPDATE)]
    assert labels == [label(UPDATE), label(FINISH), label(UPDATE, FINISH), label(FINISH, UPDATE)]
    assert len({"", *labels}) == 5


def test_the_same_update_again_is_another_one() -> None:
    """Its data may be others: they come by another way."""
    again = ("collective_rpc", "update_weights", b"call 17")
    assert label(again) != label(UPDATE)


def test_an_engine_where_a_call_failed_has_another_label() -> None:
    """Part of the weights may be new."""
    assert label(UPDATE, failed=UPDATE) not in ("", label(UPDATE))


def test_a_call_of_an_unknown_kind_may_change_weights() -> None:
    assert label(("collective_rpc", ["a list"], b"call 7")) != ""


def test_an_engine_without_kv_of_earlier_weights_differs_from_one_with_it() -> None:
    """Its prefix cache would get it again from there."""
    assert label(UPDATE, RESET) not in ("", label(UPDATE))
    assert label(UPDATE, RESET, RESET) == label(UPDATE, RESET)
    assert label(UPDATE, RESET, failed=RESET) == label(UPDATE)
    assert label(UPDATE, RESET, FINISH) == label(UPDATE, FINISH)
