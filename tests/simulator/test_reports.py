"""What the scheduler knows when it dispatches; first tokens computed by hand.

Two idle instances, three requests within 2 ms. A prefill takes 0.03 s, whether of one of them or
of two. Where a request went shows in when its first token came.
"""

from dataclasses import replace

import pytest

from sterna.policy.presets import INFAAS_PP, ROUND_ROBIN
from sterna.simulator import Report, simulate
from tests.simulator.builders import configuration, requests

BURST = requests((0.0, 16, 1), (0.001, 16, 1), (0.002, 16, 1))
SPREAD = [0.03, 0.031, 0.06]
"""One instance has the first and the third, the other the second."""
PILED = [0.03, 0.06, 0.06]
"""One instance has all three; the second and the third wait for the first one's prefill."""


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize(
    ("report", "counts_dispatched", "expected"),
    [
        (Report.LIVE, False, SPREAD),
        (Report.STALE, False, PILED),
        (Report.STALE, True, SPREAD),
    ],
)
def test_stale_reports_let_a_burst_pile_onto_one_instance(
    report: Report, counts_dispatched: bool, expected: list[float], is_fast: bool
) -> None:
    """The state at the beginning of the last step that has ended is seen: there is none yet. What
    the scheduler has dispatched and no report shows, it can know by itself."""
    policy = replace(INFAAS_PP, counts_dispatched=counts_dispatched)
    config = configuration(policy, num_instances=2, report=report, is_fast=is_fast)
    records, _ = simulate(BURST, config)
    assert records.first_token_s == pytest.approx(expected)


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_stale_report_shows_what_the_last_step_began_with(is_fast: bool) -> None:
    """From 0.2 on i0 runs a request of 64 tokens, and i1 prefills one of 16 until 0.23; one of
    640 came during that step and is prefilled in the next. A request that comes at 0.25 goes to
    i1, since its last step that has ended began with 16 tokens, and waits for the long prefill
    and its own. By live loads it goes to i0, whose decode step ends at about 0.266."""
    trace = requests((0.1, 64, 20), (0.2, 16, 20), (0.201, 640, 1), (0.25, 16, 1))
    policy = replace(INFAAS_PP, counts_dispatched=False)
    config = configuration(policy, num_instances=2, is_fast=is_fast)
    long_s = 0.005 + 640 * 0.0002 + 640**2 * 4e-9
    records, _ = simulate(trace, replace(config, report=Report.STALE))
    assert records.first_token_s[2:] == pytest.approx([0.23 + long_s, 0.26 + long_s])
    for report in (Report.LIVE, Report.STEP):
        records, _ = simulate(trace, replace(config, report=report))
        assert records.first_token_s[2] == pytest.approx(0.23 + long_s)
        assert records.first_token_s[3] == pytest.approx(0.266 + 0.03, abs=0.001)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize(
    ("report", "goes_behind_the_long_one"),
    [(Report.LIVE, False), (Report.STEP, True), (Report.STALE, True)],
)
def test_what_comes_during_a_step_is_reported_when_the_next_begins(
    report: Report, goes_behind_the_long_one: bool, is_fast: bool
) -> None:
    """As before, but the last request comes while i1 still prefills the one of 16 tokens: only a
    live report shows the long one in its queue."""
    trace = requests((0.1, 64, 20), (0.2, 16, 20), (0.201, 640, 1), (0.22, 16, 1))
    policy = replace(INFAAS_PP, counts_dispatched=False)
    config = configuration(policy, num_instances=2, report=report, is_fast=is_fast)
    records, _ = simulate(trace, config)
    long_s = 0.005 + 640 * 0.0002 + 640**2 * 4e-9
    assert bool(records.first_token_s[3] >= 0.23 + long_s) is goes_behind_the_long_one


@pytest.mark.parametrize("is_fast", [False, True])
def test_round_robin_is_blind_to_load(is_fast: bool) -> None:
    """Section 6.1: it spreads requests evenly, whatever their lengths."""
    trace = requests((0.0, 640, 1), (0.001, 16, 1), (0.002, 640, 1), (0.003, 16, 1))
    config = configuration(ROUND_ROBIN, num_instances=2, is_fast=is_fast)
    records, _ = simulate(trace, config)
    # 0.005 + 640 x 0.0002 + 640^2 x 4e-9, twice on the first instance.
    long_s = 0.005 + 0.128 + 640**2 * 4e-9
    assert records.first_token_s == pytest.approx([long_s, 0.031, 2 * long_s, 0.061])
