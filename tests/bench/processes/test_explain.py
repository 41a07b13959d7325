"""The benchmark of the cost of explanations: its samples and its report."""

import pytest

from bench.processes import explain

HISTORIES = "begin (sterna/frontend/requests/histories.py:120)"
TIMING = "__call__ (sterna/frontend/http/server_timing.py:90)"
ROUTER = "send (sterna/frontend/vllm_server/router.py:200)"


def test_a_sample_counts_within_explaining_code_and_in_the_middleware_itself() -> None:
    stacks = [
        f"{TIMING};{ROUTER};{HISTORIES};client_id (sterna/frontend/requests/request_ids.py:3) 2",
        f"{TIMING} 1",
        f"{TIMING};call_later (asyncio/base_events.py:600) 3",
        # The middleware is around all of the application.
        f"{TIMING};app (fastapi/routing.py:1) 5",
        f"{TIMING};{ROUTER};call_later (asyncio/base_events.py:600) 2",
        "run (threading.py:9);Condition.wait (threading.py:3) 100",
    ]
    assert explain.seen(stacks) == (6, 13)


def row(seed: int, *, explaining: int) -> dict[str, object]:
    return {
        **{"seed": seed, "load": "short", "n": 10, "failed": 0},
        **{"front end: explaining": explaining, "front end: all": 900},
        **{"scheduler: explaining": 0, "scheduler: all": 100},
    }


@pytest.mark.parametrize(("explaining", "is_reached"), [(10, True), (11, False)])
def test_the_share_is_that_of_all_processes(explaining: int, is_reached: bool) -> None:
    rows = [row(seed, explaining=explaining) for seed in (1, 2)]
    found = explain.summary(rows)
    assert found["short: share"] == explaining / 1_000
    assert [each["is_reached"] for each in found["goals"]] == [is_reached]  # type: ignore[union-attr]
    assert "| short | 1." in explain.markdown(rows)
