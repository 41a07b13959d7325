"""Latencies of the requests of each priority class. Pure.

They are measured at the front end, whichever instances the tokens come from: pauses for migrations
and deaths are included.
"""

from dataclasses import dataclass, field
from enum import Enum

from sterna.types import RequestId


class Latency(Enum):
    """A kind of latency; each has a histogram of its own."""

    DISPATCH = "dispatch"
    """From the beginning of the request to when it was first sent to an instance."""
    FIRST_TOKEN = "first token"
    """From the beginning of the request to its first output."""
    INTER_TOKEN = "inter-token"
    """From one output to the next."""
    REQUEST = "request"
    """From the beginning of the request to its last output."""
    PREEMPTION = "preemption"
    """From when an instance took the request's memory back to its next output."""
    RECOVERY = "recovery"
    """From the last output of an instance that died, or handed the request back, to the first one
    of another instance."""


Observed = dict[tuple[Latency, str], list[float]]
"""Times in seconds, by kind of latency and class."""


@dataclass(slots=True)
class _Timed:
    class_name: str
    begun_s: float
    is_dispatched: bool = False
    is_lost: bool = False
    last_s: float | None = None


@dataclass(slots=True)
class Latencies:
    """The requests under way at one front end, and the latencies since the last `take`."""

    _open: dict[RequestId, _Timed] = field(default_factory=dict)
    _observed: Observed = field(default_factory=dict)

    @property
    def num_observed(self) -> int:
        """The number of latencies since the last `take`."""
        return sum(map(len, self._observed.values()))

    def begin(self, request_id: RequestId, class_name: str, now_s: float) -> None:
        """A request begins."""
        self._open[request_id] = _Timed(class_name, now_s)

    def on_dispatched(self, request_id: RequestId, now_s: float) -> None:
        """The request has been sent to an instance; no effect if it is not timed, or was before."""
        timed = self._open.get(request_id)
        if timed is not None and not timed.is_dispatched:
            timed.is_dispatched = True
            self._note(Latency.DISPATCH, timed.class_name, now_s - timed.begun_s)

    def on_lost(self, request_id: RequestId) -> None:
        """The request has left its instance, which died or handed it back, and goes on elsewhere;
        no effect if it is not timed."""
        timed = self._open.get(request_id)
        if timed is not None:
            timed.is_lost = True

    def on_preempted(self, request_id: RequestId, seconds: float) -> None:
        """The output that arrives is the first one since an instance took the request's memory
        back, that long ago; no effect if it is not timed."""
        timed = self._open.get(request_id)
        if timed is not None:
            self._note(Latency.PREEMPTION, timed.class_name, seconds)

    def on_output(self, request_id: RequestId, now_s: float, *, is_finished: bool) -> None:
        """Tokens of the request have arrived; no effect if it is not timed."""
        timed = self._open.get(request_id)
        if timed is None:
            return
        if timed.last_s is None:
            self._note(Latency.FIRST_TOKEN, timed.class_name, now_s - timed.begun_s)
        else:
            self._note(Latency.INTER_TOKEN, timed.class_name, now_s - timed.last_s)
            if timed.is_lost:
                self._note(Latency.RECOVERY, timed.class_name, now_s - timed.last_s)
        timed.is_lost = False
        timed.last_s = now_s
        if is_finished:
            self._note(Latency.REQUEST, timed.class_name, now_s - timed.begun_s)
            del self._open[request_id]

    def on_stopped(self, request_id: RequestId) -> None:
        """The request has ended with the outputs that have arrived, since a stop string is in them;
        no effect if it is not timed."""
        timed = self._open.pop(request_id, None)
        if timed is not None and timed.last_s is not None:
            self._note(Latency.REQUEST, timed.class_name, timed.last_s - timed.begun_s)

    def forget(self, request_id: RequestId) -> None:
        """The request has failed, or its client has left; no effect if it is not timed."""
        self._open.pop(request_id, None)

    def take(self) -> Observed:
        """Return the latencies since the last call."""
        observed, self._observed = self._observed, {}
        return observed

    def _note(self, latency: Latency, class_name: str, seconds: float) -> None:
        self._observed.setdefault((latency, class_name), []).append(seconds)
