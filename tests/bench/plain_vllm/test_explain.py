"""The benchmark of what explanations cost: what counts as one, and the report."""

import pytest

from bench.plain_vllm import explain

HISTORIES = "begin (sterna/frontend/requests/histories.py:120)"
TIMING = "__call__ (sterna/frontend/http/server_timing.py:90)"
ROUTER = "send (sterna/frontend/vllm_server/router.py:200)"


def test_the_innermost_code_decides_whether_a_look_is_an_explanation() -> None:
    stacks = [
        f"{TIMING};{ROUTER};{HISTORIES};append (collections.py:3) 2",
        # The middleware is around all of the application.
        f"{TIMING};app (fastapi/routing.py:1) 5",
        f"{TIMING};{ROUTER} 2",
        f"{TIMING} 1",
        "run (threading.py:9);Condition.wait (threading.py:3) 100",
    ]
    assert explain.seen(stacks) == (3, 10)


def row(seed: int, *, explaining: int) -> dict[str, object]:
    return {
        **{"seed": seed, "load": "short", "n": 10, "failed": 0},
        **{"front end: explaining": explaining, "front end: all": 400},
        **{"scheduler: explaining": 0, "scheduler: all": 100},
        **{"instance: explaining": 0, "instance: all": 500},
    }


@pytest.mark.parametrize(("explaining", "is_reached"), [(10, True), (11, False)])
def test_the_share_is_that_of_all_processes(explaining: int, is_reached: bool) -> None:
    rows = [row(seed, explaining=explaining) for seed in (1, 2)]
    found = explain.summary(rows)
    assert found["short: share"] == explaining / 1_000
    assert [each["is_reached"] for each in found["goals"]] == [is_reached]  # type: ignore[union-attr]
    assert "| short | 2." in explain.markdown(rows)
