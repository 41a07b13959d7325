"""Histories as OpenTelemetry spans, at a receiver of its protocol."""

import time
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("grpc")

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

from sterna.frontend.metrics.traces import Traces, spans_of
from tests.otlp_receiver import receiving

CLIENTS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
WHY = {"rule": "soonest", "held_s": 0.38, "chosen": {"instance": "i1", "cost": 312.0}}


def history(*events: tuple[float, str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "cmpl-tern-0-9f86d081",
        "arrived_s": 1_700_000_000.0,
        "events": [{"at_s": at_s, "event": kind, **facts} for at_s, kind, facts in events],
    }


WHOLE = history(
    (0.0, "arrived", {}),
    (0.1, "held", {"room_tokens": 640.0}),
    (0.4, "dispatched", {"instance": "i1", "why": WHY}),
    (0.5, "scheduled", {"instance": "i1", "waited_s": 0.1}),
    (0.7, "first token", {"cached_tokens": 512}),
    (1.0, "did not move", {"from": "i1", "to": "i3", "outcome": "no_memory", "suspended_s": 0.0}),
    (2.0, "moved", {"from": "i1", "to": "i3", "stages": 2, "suspended_s": 0.25, "why": None}),
    (3.0, "preempted", {"instance": "i3"}),
    (3.5, "resumed", {"instance": "i3", "waited_s": 0.5}),
    (5.0, "finished", {"reason": None}),
)


def test_a_history_is_a_sequence_of_phases() -> None:
    assert [(each.name, each.begin_s, each.end_s) for each in spans_of(WHOLE)] == [
        ("scheduler", 0.0, 0.4),
        ("queue", 0.4, 0.5),
        ("prefill", 0.5, 0.7),
        ("refused move", 1.0, 1.0),
        ("migration", 1.75, 2.0),
        ("preemption", 3.0, 3.5),
        ("decode", 0.7, 5.0),
    ]
    scheduler, *_, decode = spans_of(WHOLE)
    assert scheduler.attributes == {
        "sterna.instance": "i1",
        "sterna.why.rule": "soonest",
        "sterna.why.held_s": 0.38,
        "sterna.why.chosen.instance": "i1",
        "sterna.why.chosen.cost": 312.0,
    }
    assert decode.attributes == {"sterna.state": "finished"}


def test_a_request_that_was_lost_begins_again() -> None:
    lost = history(
        (0.0, "arrived", {}),
        (0.1, "dispatched", {"instance": "i1", "why": None}),
        (0.3, "lost", {"output_tokens": 0}),
        (0.4, "dispatched", {"instance": "i3", "why": None}),
        (0.5, "failed", {"reason": "it is too large"}),
    )
    assert [(each.name, each.begin_s, each.end_s) for each in spans_of(lost)] == [
        ("scheduler", 0.0, 0.1),
        ("queue", 0.1, 0.3),
        ("loss", 0.3, 0.3),
        ("scheduler", 0.3, 0.4),
        ("queue", 0.4, 0.5),
    ]


def test_what_comes_behind_a_loss_is_decoded_again() -> None:
    lost = history(
        (0.0, "arrived", {}),
        (0.1, "dispatched", {"instance": "i1", "why": None}),
        (0.5, "first token", {}),
        (1.0, "preempted", {"instance": "i1"}),
        (5.0, "lost", {"output_tokens": 40}),
        (5.1, "dispatched", {"instance": "i3", "why": None}),
        (5.5, "goes on", {}),
        (60.0, "finished", {"reason": None}),
    )
    assert [(each.name, each.begin_s, each.end_s) for each in spans_of(lost)][-4:] == [
        ("loss", 5.0, 5.0),
        ("scheduler", 5.0, 5.1),
        ("queue", 5.1, 5.5),
        ("decode", 5.5, 60.0),
    ]


def test_a_collector_that_does_not_answer_holds_nothing_up() -> None:
    unreachable = OTLPSpanExporter(endpoint="http://127.0.0.1:9", insecure=True)
    traces = Traces(unreachable, 1)
    begun_s = time.monotonic()
    traces.add(WHOLE, None)
    traces.close(0.01)
    assert time.monotonic() - begun_s < 5.0


def test_spans_arrive_in_the_trace_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with receiving() as receiver:
        traces = Traces(OTLPSpanExporter(endpoint=receiver.endpoint, insecure=True), 1)
        with traces.request("cmpl-tern-0", CLIENTS) as headers:
            traces.add(WHOLE, headers)
        traces.close(60.0)
        spans = {each.name: each for each in receiver.until("request", "decode")}
    request = spans.pop("request")
    assert request.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert request.parent_id == "b7ad6b7169203331"
    assert request.service == "sterna"
    assert {each.trace_id for each in spans.values()} == {request.trace_id}
    assert {each.parent_id for each in spans.values()} == {request.span_id}
    decode = spans["decode"]
    assert (decode.begin_s, decode.end_s) == pytest.approx((1_700_000_000.7, 1_700_000_005.0))


def test_a_request_without_a_trace_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "arctic")
    with receiving() as receiver:
        traces = Traces(OTLPSpanExporter(endpoint=receiver.endpoint, insecure=True), 1)
        with traces.request("cmpl-tern-0", None) as headers:
            assert headers["traceparent"]
        traces.add(WHOLE, headers)
        traces.close(60.0)
        spans = {each.name: each for each in receiver.until("request", "decode")}
    assert spans["request"].parent_id == ""
    assert spans["decode"].parent_id == spans["request"].span_id
    assert spans["request"].service == "arctic"
