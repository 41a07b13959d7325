"""A receiver of OpenTelemetry's protocol: its own gRPC service, which keeps the spans that come."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass(frozen=True, slots=True)
class Received:
    """A span; ids in hexadecimal, times in seconds."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_s: float
    end_s: float
    attributes: dict[str, Any] = field(default_factory=dict)


class Receiver(service.TraceServiceServicer):  # type: ignore[misc]
    """What has come so far."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Received] = []
        self._news = threading.Condition()

    def Export(self, request: Any, context: object) -> Any:
        """See OpenTelemetry's TraceService."""
        with self._news:
            for resource in request.resource_spans:
                name = _attributes(resource.resource).get("service.name", "")
                for scope in resource.scope_spans:
                    self._spans += [_received(name, each) for each in scope.spans]
            self._news.notify_all()
        return messages.ExportTraceServiceResponse()

    def until(self, *names: str, timeout_s: float = 60.0) -> list[Received]:
        """Wait until spans of all these names have come; returns all spans."""

        def have_come() -> bool:
            return set(names) <= {each.name for each in self._spans}

        with self._news:
            assert self._news.wait_for(have_come, timeout_s), [each.name for each in self._spans]
            return [*self._spans]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver at an address of this machine."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    service.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def _received(service_name: str, span: Any) -> Received:
    return Received(
        span.name,
        service_name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _attributes(span),
    )


def _attributes(owner: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes
    }
