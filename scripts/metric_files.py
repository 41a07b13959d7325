"""Reference page, Prometheus's alert rules and Grafana dashboard, from one table of the metrics.

    python -m scripts.metric_files

The table is `sterna.frontend.metrics.metric_table`; what is watched and shown is here.
`tests/deploy` compares the files with the code, and has Prometheus itself check them.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sterna.frontend.metrics.metric_table import METRICS, Kind

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operations" / "metrics.md"
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "sterna.json"

BEGIN, END = "<!-- written by scripts/metric_files.py -->", "<!-- end of what is written -->"

VLLM_NAMES = frozenset(
    {
        "vllm:generation_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    }
)
"""vLLM's metrics that are used here."""

OUR_JOBS = 'job=~"sterna.*"'
"""Each server has a job of its own, whose name begins so."""

SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum")}


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule of Prometheus.

    Attributes:
        expression: what is wrong, in PromQL.
        lasts: for how long before the alert fires.
        severity: "page" for what clients notice, else "ticket".
        summary: one sentence.
        advice: what to do.
    """

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    advice: str


ALERTS = (
    Alert(
        "SternaDown",
        # While it starts, which may take half an hour, it has not answered yet.
        f"up{{{OUR_JOBS}}} == 0 and max_over_time(up{{{OUR_JOBS}}}[1h]) == 1",
        "1m",
        "page",
        "A front end does not answer that has answered within the last hour.",
        "Look at the server's log; `sterna doctor` checks the machine.",
    ),
    Alert(
        "SternaNotUp",
        f"up{{{OUR_JOBS}}} == 0",
        "30m",
        "page",
        "A front end has not answered for half an hour.",
        "Look at the server's log: it may be starting still, or start again and again.",
    ),
    Alert(
        # A pod that is pending, or was deleted, is no target, and has no `up`.
        "SternaGone",
        f"count by (job) (present_over_time(up{{{OUR_JOBS}}}[1h])) unless on (job) "
        f"up{{{OUR_JOBS}}}",
        "5m",
        "page",
        "Prometheus no longer scrapes a server that it scraped within the last hour.",
        "Its pod may be pending or gone; for an hour also after it was removed for good.",
    ),
    Alert(
        "SternaNoInstance",
        f"up{{{OUR_JOBS}}} == 1 unless on (job) count by (job) "
        "(sterna_instance_total_tokens == sterna_instance_total_tokens)",
        "2m",
        "page",
        "No instance has reported.",
        "Requests wait. Look for `instance` in the log.",
    ),
    Alert(
        "SternaFewInstances",
        'max by (job) (sterna_wanted_instances) > max by (job) (sterna_instances{state="running"})',
        "15m",
        "ticket",
        "Fewer instances take requests than are wanted.",
        "`sterna instances` shows those that start or wait; the log says `instance not started`, "
        "or `instance waits for a place`, and why.",
    ),
    Alert(
        "SternaRequestsHeld",
        "max by (job) (sterna_held_requests) > 100",
        "5m",
        "ticket",
        "More than 100 requests wait for an instance with memory.",
        "Add instances (`sterna start N`), or limit clients (`--max-queued-requests`).",
    ),
    Alert(
        "SternaSlowFirstToken",
        "histogram_quantile(0.99, sum by (job, class, le) "
        "(rate(sterna_time_to_first_token_seconds_bucket[5m]))) > 10",
        "10m",
        "ticket",
        "One request in a hundred waits more than 10 s for its first token.",
        "Add instances, or let the load decide (`--max-instances`).",
    ),
    Alert(
        "SternaPreemptions",
        "sum by (job) (deriv(sterna_instance_preemptions[10m]) > 0) > 0.1",
        "10m",
        "ticket",
        "Engines take memory back from running requests, more than six times a minute.",
        "The cluster is short of KV cache memory: add instances, or lower --max-num-seqs.",
    ),
    Alert(
        "SternaMigrationsFail",
        'sum by (job) (rate(sterna_migrations_total{outcome=~"transfer_failed|peer_silent|'
        'lease_expired|too_many_stages"}[10m])) > 0.2 * sum by (job) '
        "(rate(sterna_migrations_total[10m])) and sum by (job) "
        "(rate(sterna_migrations_total[10m])) > 0.01",
        "10m",
        "ticket",
        "One migration in five fails on its way.",
        "Look at the network between the instances, and at `migration aborted` in the log.",
    ),
    Alert(
        "SternaInstancesDie",
        "sum by (job) (increase(sterna_requests_sent_again_total[15m])) > 0",
        "0m",
        "ticket",
        "Requests were sent again: their instance died or handed them back, or tokens were lost.",
        "Look for the instance's end in the log (docs/operations/failures.md).",
    ),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of the dashboard.

    Attributes:
        curves: legend and PromQL expression of each.
        unit: Grafana's name of the unit.
    """

    title: str
    unit: str
    curves: Mapping[str, str]
    may_be_negative: bool = False


INSTANCE = "{{job}} {{instance}}"
"""The legend of an instance's curve."""


def _shown(name: str) -> str:
    """The metric, of the servers that are chosen in the dashboard."""
    return f'{name}{{job=~"$job"}}'


def _rate(name: str) -> str:
    return _rate_of(_shown(name))


def _rate_of(series: str) -> str:
    return f"rate({series}[$__rate_interval])"


def _by_instance(name: str) -> str:
    """The gauge of each instance, which several front ends show. Each server has an `i0`."""
    return f"max by (job, instance) ({_shown(f'sterna_instance_{name}')})"


def _of_servers(name: str) -> str:
    """The sum over the servers; the front ends of one server all show the same."""
    return f"sum(max by (job) ({_shown(name)}))"


def _quantiles(name: str, *labels: str) -> dict[str, str]:
    kept = ", ".join((*labels, "le"))
    legend = "".join(f"{{{{{label}}}}} " for label in labels)
    return {
        f"{legend}{quantile}": f"histogram_quantile({share}, "
        f"sum by ({kept}) ({_rate(f'{name}_bucket')}))"
        for quantile, share in (("median", 0.5), ("P99", 0.99))
    }


def _of_instances(name: str) -> dict[str, str]:
    return {INSTANCE: _by_instance(name)}


def _rate_of_instances(name: str) -> dict[str, str]:
    """By `deriv`, because these are sums in gauges, which end with their instance."""
    gauge = _shown(f"sterna_instance_{name}")
    return {INSTANCE: f"max by (job, instance) (deriv({gauge}[$__rate_interval]))"}


COMMITTED = 'sterna_migrations_total{job=~"$job", outcome="committed"}'

ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Latencies": (
        Panel(
            "Time to first token", "s", _quantiles("sterna_time_to_first_token_seconds", "class")
        ),
        Panel(
            "Time between tokens", "s", _quantiles("sterna_inter_token_latency_seconds", "class")
        ),
        Panel("Whole request", "s", _quantiles("sterna_request_latency_seconds", "class")),
        Panel("Dispatch", "s", _quantiles("sterna_dispatch_latency_seconds", "class")),
    ),
    "Load": (
        Panel(
            "Requests",
            "short",
            {
                "running": _of_servers("vllm:num_requests_running"),
                "waiting": _of_servers("vllm:num_requests_waiting"),
                "held at the scheduler": _of_servers("sterna_held_requests"),
            },
        ),
        Panel(
            "Requests by class",
            "reqps",
            {"{{class}}": f"sum by (class) ({_rate('sterna_requests_total')})"},
        ),
        Panel(
            "Output tokens",
            "short",
            {"tokens/s": f"sum({_rate('vllm:generation_tokens_total')})"},
        ),
        Panel(
            "Running requests by execution priority",
            "short",
            {
                "{{execution_priority}}": "sum by (execution_priority) (max by (job, "
                f"execution_priority) ({_shown('sterna_running_requests')}))"
            },
        ),
        Panel("Running requests by instance", "short", _of_instances("running_requests")),
        Panel("Queuing requests by instance", "short", _of_instances("queuing_requests")),
        Panel(
            "Instances",
            "short",
            {
                "wanted": _of_servers("sterna_wanted_instances"),
                "{{state}}": f"sum by (state) (max by (job, state) ({_shown('sterna_instances')}))",
            },
        ),
    ),
    "Memory": (
        Panel(
            "KV cache in use",
            "percentunit",
            {
                "{{job}}": f"max by (job) ({_shown('vllm:kv_cache_usage_perc')})",
                INSTANCE: f"{_by_instance('used_tokens')} / {_by_instance('total_tokens')}",
            },
        ),
        Panel(
            "KV cache in use by execution priority, in tokens",
            "short",
            {
                "{{execution_priority}}": "sum by (execution_priority) (max by (job, "
                f"execution_priority) ({_shown('sterna_used_tokens')}))"
            },
        ),
        Panel("Freeness", "short", _of_instances("freeness_steps"), may_be_negative=True),
        Panel(
            "Fragmentation: free memory, and the demand of the first waiting requests",
            "short",
            {
                # Those of instances that are gone are NaN, and so would the sums be.
                "free": f"sum({_by_instance('total_tokens')} - {_by_instance('used_tokens')} >= 0)",
                "needed": f"sum({_by_instance('head_demand_tokens')} >= 0)",
            },
        ),
        Panel("Fragmentation", "percentunit", {"share": _of_servers("sterna_fragmentation_ratio")}),
        Panel("Preemptions a second", "short", _rate_of_instances("preemptions")),
        Panel(
            "From a preemption to the next token",
            "s",
            _quantiles("sterna_preemption_loss_seconds", "class"),
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            {
                "all": f"sum({_rate('vllm:prefix_cache_hits_total')}) / "
                f"sum({_rate('vllm:prefix_cache_queries_total')})",
                f"{INSTANCE}, since its start": f"{_by_instance('prefix_hit_tokens')} / "
                f"{_by_instance('prefix_tokens')}",
            },
        ),
    ),
    "Migrations": (
        Panel(
            "Migrations by outcome",
            "cps",
            {"{{outcome}}": f"sum by (outcome) ({_rate('sterna_migrations_total')})"},
        ),
        Panel(
            "Moves by cause",
            "cps",
            {"{{cause}}": f"sum by (cause) ({_rate_of(COMMITTED)})"},
        ),
        Panel("Bytes sent to other instances, a second", "Bps", _rate_of_instances("sent_bytes")),
        Panel(
            "Downtime of a request that moves", "s", _quantiles("sterna_migration_downtime_seconds")
        ),
        Panel(
            "Stages of a move",
            "short",
            {
                "mean": f"sum({_rate('sterna_migration_stages_sum')}) / "
                f"sum({_rate('sterna_migration_stages_count')})"
            },
        ),
        Panel("Moving away", "short", _of_instances("outgoing_migrations")),
        Panel("Moving in", "short", _of_instances("incoming_migrations")),
        Panel("Moved away, a second", "short", _rate_of_instances("committed_migrations")),
        Panel("Stayed, a second", "short", _rate_of_instances("aborted_migrations")),
        Panel(
            "Requests sent to another instance",
            "short",
            {"a second": f"sum({_rate('sterna_requests_sent_again_total')})"},
        ),
        Panel(
            "From the last token of an instance that is gone to the next one",
            "s",
            _quantiles("sterna_recovery_gap_seconds", "class"),
        ),
        Panel(
            "Auto-scaling, instances a second",
            "short",
            {"{{direction}}": f"sum by (direction) ({_rate('sterna_scaling_decisions_total')})"},
        ),
    ),
}

PANEL_WIDTH, PANEL_HEIGHT, GRID_WIDTH = 8, 8, 24


def main() -> int:
    """Write the files."""
    PAGE.write_text(page(PAGE.read_text()))
    for path, text in ((RULES, rules()), (DASHBOARD, dashboard())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))
    return 0


def page(text: str) -> str:
    """Return the reference page with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {each.kind.value} | {labels} | {each.text} |")
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def rules() -> str:
    """Return the file of Prometheus's alert rules."""
    content = {
        "groups": [
            {
                "name": "sterna",
                "rules": [
                    {
                        "alert": each.name,
                        "expr": each.expression,
                        "for": each.lasts,
                        "labels": {"severity": each.severity},
                        "annotations": {"summary": each.summary, "description": each.advice},
                    }
                    for each in ALERTS
                ],
            }
        ]
    }
    head = "# Written by scripts/metric_files.py.\n"
    return head + yaml.safe_dump(content, sort_keys=False, width=100)


def dashboard() -> str:
    """Return the Grafana dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1},
            }
        )
        y += 1
        for number, panel in enumerate(row):
            x = number * PANEL_WIDTH % GRID_WIDTH
            if number and x == 0:
                y += PANEL_HEIGHT
            panels.append(_panel(len(panels) + 1, panel, x, y))
        y += PANEL_HEIGHT
    content = {
        "title": "Sterna",
        "uid": "sterna",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                },
                {
                    "name": "job",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(sterna_held_requests, job)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    floor = {} if panel.may_be_negative else {"min": 0}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, **floor}, "overrides": []},
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": curve,
                "legendFormat": legend,
            }
            for index, (legend, curve) in enumerate(panel.curves.items())
        ],
    }


def expressions() -> list[str]:
    """Return every PromQL expression of the rules and of the dashboard."""
    curves = (curve for row in ROWS.values() for panel in row for curve in panel.curves.values())
    return [*(each.expression for each in ALERTS), *curves]


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names of Sterna's and vLLM's metrics in these texts."""
    return {name for text in texts for name in re.findall(r"\b(?:sterna_|vllm:)[a-z_]+", text)}


def known_names() -> set[str]:
    """Return the names that a server shows, as PromQL needs them."""
    shown = {
        f"{each.name}{suffix}" for each in METRICS for suffix in SUFFIXES.get(each.kind, ("",))
    }
    return shown | VLLM_NAMES


if __name__ == "__main__":
    sys.exit(main())
