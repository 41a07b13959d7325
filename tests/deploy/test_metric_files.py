"""The reference page of metrics, the alert rules and the dashboard: they follow the code's table,
and Prometheus accepts them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.metric_files import (
    ALERTS,
    DASHBOARD,
    PAGE,
    RULES,
    dashboard,
    expressions,
    known_names,
    names_in,
    page,
    rules,
)
from sterna.frontend.metrics.metric_table import METRICS
from tests.needed_tools import missing_program, needs

NEEDS_PROMTOOL = needs(missing_program("promtool", "prometheus"))


def test_the_files_are_what_the_script_writes() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run `python -m scripts.metric_files`"
    assert rules() == RULES.read_text(), "run `python -m scripts.metric_files`"
    assert dashboard() == DASHBOARD.read_text(), "run `python -m scripts.metric_files`"


def test_rules_and_dashboard_use_metrics_that_a_server_shows() -> None:
    assert names_in(expressions()) <= known_names()


def test_every_metric_is_on_the_dashboard() -> None:
    shown = names_in([DASHBOARD.read_text()])
    missing = [each.name for each in METRICS if not any(n.startswith(each.name) for n in shown)]
    assert missing == []


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(dashboard())["panels"]
    places = [
        {
            (x, y)
            for x in range(each["gridPos"]["x"], each["gridPos"]["x"] + each["gridPos"]["w"])
            for y in range(each["gridPos"]["y"], each["gridPos"]["y"] + each["gridPos"]["h"])
        }
        for each in panels
    ]
    assert sum(map(len, places)) == len(set().union(*places))
    assert all(x < 24 for place in places for x, _ in place)
    assert len({each["id"] for each in panels}) == len(panels)


@NEEDS_PROMTOOL
def test_prometheus_accepts_the_rules() -> None:
    done = subprocess.run(
        ("promtool", "check", "rules", str(RULES)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    written = ", ".join(f'{key}="{value}"' for key, value in {"job": "sterna", **labels}.items())
    return {"series": f"{name}{{{written}}}", "values": values}


def first_tokens(values: str, at_most_s: str) -> dict[str, str]:
    labels = {"le": at_most_s, "class": "a"}
    return series("sterna_time_to_first_token_seconds_bucket", values, **labels)


def gone(name: str) -> dict[str, str]:
    """The series of an instance that has ended."""
    return series(name, " ".join(["NaN"] * 60), instance="gone")


def present(running: str) -> list[dict[str, str]]:
    """The numbers of instances that run, beside one that starts."""
    return [
        series("sterna_instances", values, state=state)
        for state, values in (("running", running), ("starting", "1x60"))
    ]


UP = series("up", "1x60")
WANTED = series("sterna_wanted_instances", "4x60")
INSTANCE = series("sterna_instance_total_tokens", "1000x60", instance="i0")
OF_ANOTHER = [
    series("up", "1x60", job="sterna-small"),
    series("sterna_instance_total_tokens", "1000x60", instance="i0", job="sterna-small"),
]
"""Another server, which is well."""
MIGRATIONS = "sterna_migrations_total"

CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "SternaDown": ([series("up", "1x10 0x50")], [series("up", "0x60")]),
    "SternaNotUp": ([series("up", "0x60")], [series("up", "1x40 0x20")]),
    "SternaGone": ([series("up", "1x10 stale"), *OF_ANOTHER], [UP, *OF_ANOTHER]),
    "SternaNoInstance": (
        [UP, gone("sterna_instance_total_tokens"), *OF_ANOTHER],
        [UP, INSTANCE, gone("sterna_instance_total_tokens")],
    ),
    "SternaFewInstances": (
        [WANTED, *present("3x60")],
        # One died ten minutes ago, and its successor starts.
        [WANTED, *present("4x20 3x40")],
    ),
    "SternaRequestsHeld": (
        [series("sterna_held_requests", "101x60")],
        [series("sterna_held_requests", "100x60")],
    ),
    "SternaSlowFirstToken": (
        [first_tokens("0x60", "10"), first_tokens("0+9x60", "25"), first_tokens("0+9x60", "+Inf")],
        [first_tokens("0+9x60", "10"), first_tokens("0+9x60", "+Inf")],
    ),
    "SternaPreemptions": (
        [
            series("sterna_instance_preemptions", "0+7x60", instance="i0"),
            gone("sterna_instance_preemptions"),
        ],
        [
            series("sterna_instance_preemptions", "0+5x60", instance="i0"),
            gone("sterna_instance_preemptions"),
        ],
    ),
    "SternaMigrationsFail": (
        [
            series(MIGRATIONS, "0+10x60", outcome="committed"),
            series(MIGRATIONS, "0+3x60", outcome="transfer_failed"),
        ],
        [
            series(MIGRATIONS, "0+10x60", outcome="committed"),
            series(MIGRATIONS, "0+9x60", outcome="request_finished"),
        ],
    ),
    "SternaInstancesDie": (
        [series("sterna_requests_sent_again_total", "0x20 1x40")],
        [series("sterna_requests_sent_again_total", "5x60")],
    ),
}
"""For each alert, an hour of samples, one a minute, at whose end or before it fires, and one in
which it does not."""


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == {each.name for each in ALERTS}


@NEEDS_PROMTOOL
@pytest.mark.parametrize("name", list(CASES))
def test_an_alert_fires_when_it_should_and_only_then(name: str, tmp_path: Path) -> None:
    [alert] = [each for each in ALERTS if each.name == name]
    bad, good = CASES[name]
    labels = {"severity": alert.severity, "job": "sterna"}
    if name == "SternaSlowFirstToken":
        labels["class"] = "a"
    firing = {
        "exp_labels": labels,
        "exp_annotations": {"summary": alert.summary, "description": alert.advice},
    }
    at = "30m"

    def case(samples: list[dict[str, str]], expected: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": samples,
            "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
        }

    tests = {"rule_files": [str(RULES)], "tests": [case(bad, [firing]), case(good, [])]}
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump(tests))

    done = subprocess.run(
        ("promtool", "test", "rules", str(path)), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
