"""OpenTelemetry traces: each request's history as spans, for `--otlp-traces-endpoint`.

    request                  of a prompt; in the client's trace, if it sent a `traceparent` (W3C)
      llm_request            vLLM's own
      scheduler              from its arrival until it was sent to an instance
      queue, prefill, decode on instances
      preemption             from one to when it was scheduled again
      migration              the pause of a move
      refused move, loss     moments

The spans of an engine request are exported when it has ended. Their attributes are the fields of
`sterna explain`, behind `sterna.`.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Described = Mapping[str, Any]

_W3C = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class SpanOf:
    """A span of a history; times in seconds since the request arrived."""

    name: str
    begin_s: float
    end_s: float
    attributes: dict[str, Any] = field(default_factory=dict)


class Traces:
    """Exports the spans of one front end."""

    def __init__(self, exporter: SpanExporter, frontend_id: int) -> None:
        own: dict[str, str | int] = {"sterna.frontend": frontend_id}
        if OTEL_SERVICE_NAME not in os.environ:
            own[SERVICE_NAME] = "sterna"
        self._provider = TracerProvider(resource=Resource.create(own))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sterna")

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str] | None) -> Iterator[dict[str, str]]:
        """The span of a prompt of an HTTP request while it is answered.

        Args:
            headers: the client's `traceparent` and `tracestate`.

        Yields: the headers of what belongs into this span.
        """
        span = self._tracer.start_span(
            "request", context=_W3C.extract(headers or {}), attributes={"sterna.id": name}
        )
        inner: dict[str, str] = {}
        _W3C.inject(inner, context=set_span_in_context(span))
        try:
            yield inner
        finally:
            span.end()

    def add(self, history: Described, headers: Mapping[str, str] | None) -> None:
        """Export the spans of an engine request that has ended.

        Args:
            headers: those of the span that it belongs into.
        """
        context = _W3C.extract(headers or {})
        for each in spans_of(history):
            begin_s = history["arrived_s"] + each.begin_s
            span = self._tracer.start_span(
                each.name,
                context=context,
                start_time=int(1e9 * begin_s),
                attributes={"sterna.id": history["id"], **each.attributes},
            )
            span.end(end_time=int(1e9 * (begin_s + each.end_s - each.begin_s)))

    def close(self, timeout_s: float) -> None:
        """Export what is left within this time. A collector that does not answer would hold the
        exporter up for much longer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


_BEGINS = {
    "dispatched": "queue",
    "scheduled": "prefill",
    "first token": "decode",
    "goes on": "decode",
}
"""The phases that these events begin."""


def spans_of(history: Described) -> list[SpanOf]:
    """The spans of a history, in the order of their ends."""
    spans: list[SpanOf] = []
    begun_s, phase = 0.0, "scheduler"
    preempted_s: float | None = None
    for event in history["events"]:
        at_s, kind, attributes = event["at_s"], event["event"], _attributes(event)
        match kind:
            case "dispatched" | "scheduled" | "first token" | "goes on":
                spans.append(SpanOf(phase, begun_s, at_s, attributes))
                begun_s, phase = at_s, _BEGINS[kind]
            case "preempted":
                preempted_s = at_s
            case "resumed":
                spans.append(SpanOf("preemption", preempted_s or at_s, at_s, attributes))
                preempted_s = None
            case "moved":
                spans.append(SpanOf("migration", at_s - event["suspended_s"], at_s, attributes))
            case "did not move":
                spans.append(SpanOf("refused move", at_s, at_s, attributes))
            case "lost":
                spans += [SpanOf(phase, begun_s, at_s), SpanOf("loss", at_s, at_s, attributes)]
                begun_s, phase, preempted_s = at_s, "scheduler", None
            case "finished" | "failed" | "aborted":
                spans.append(SpanOf(phase, begun_s, at_s, {"sterna.state": kind, **attributes}))
            case _:
                pass
    return spans


def _attributes(event: Described) -> dict[str, Any]:
    """The event's facts, those within others behind a dot; unknown ones are left out."""
    flat: dict[str, Any] = {}

    def add(prefix: str, facts: Described) -> None:
        for name, value in facts.items():
            if isinstance(value, Mapping):
                add(f"{prefix}.{name}", value)
            elif value is not None and name not in ("at_s", "event"):
                flat[f"{prefix}.{name}"] = value

    add("sterna", event)
    return flat
