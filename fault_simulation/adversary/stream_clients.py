"""Clients of streams that outlive their front ends: they lose connections, and continue to read."""

import re

from fault_simulation.oracle.stream_ledger import Fate, StreamLedger
from fault_simulation.oracle.token_oracle import Ask
from fault_simulation.processes.frontends import FrontendProcess
from fault_simulation.processes.ray import Platform
from fault_simulation.processes.stream_readers import NOT_FOUND, OK, UNAVAILABLE, Connection
from fault_simulation.virtual.timeline import Violation
from sterna.frontend.resumable.event_log import EventId, event_id_of

BREAK_SHARE = 0.3
"""Of the clients: those whose connection breaks though their front end lives."""

LONGEST_ABSENCE_S = 0.5

_EVENT = re.compile(rb"id: (\S+)\ndata: (.*)\n\n")


class StreamClient:
    """One client, with one stream."""

    def __init__(self, platform: Platform, ledger: StreamLedger, ask: Ask) -> None:
        self._platform = platform
        self._world = platform.world
        self._ledger = ledger
        self._ask = ask
        self._stream_id: str = ask.request_id
        self._last = EventId(0)
        self._connection: Connection | None = None
        self._frontend: FrontendProcess | None = None
        # None while it gets an answer.
        self._away_since_s: float | None = None

    def begin(self, frontend: FrontendProcess) -> None:
        """Send the request."""
        self._ledger.begin(self._ask, self.leave)
        connection = self._connect(frontend, is_new=True)
        assert frontend.streams is not None
        begin = frontend.streams.begin
        self._world.timeline.push(
            0.0,
            frontend,
            f"accepts {self._stream_id}",
            lambda: begin(self._ask, connection),
        )
        if self._world.rng.random() < BREAK_SHARE:
            delay_s = self._world.rng.expovariate(1.0) * 0.5
            self._world.timeline.push(delay_s, None, "", self._lose_connection)

    def leave(self) -> None:
        """Go away for ever, unless the stream has ended."""
        if self._ledger.streams[self._stream_id].fate is Fate.OPEN:
            self._ledger.end(self._stream_id, Fate.LEFT)
            self._close()

    def _connect(self, frontend: FrontendProcess, *, is_new: bool) -> Connection:
        self._frontend = frontend
        self._connection = Connection(self, self._stream_id, self._last, is_new=is_new)
        assert frontend.streams is not None
        frontend.streams.connect(self._connection)
        return self._connection

    def _close(self) -> None:
        """Close the connection, if there is one; its front end hears of it."""
        connection, frontend = self._connection, self._frontend
        self._connection = None
        if connection is None or frontend is None or frontend.streams is None:
            return
        connection.is_closed = True
        reading = frontend.streams.reading
        what = f"the client of {self._stream_id} has gone"
        self._world.timeline.push(0.0, frontend, what, lambda: reading.leave(connection))

    def _lose_connection(self) -> None:
        if self._connection is not None:
            self._world.counts["stream: connection lost"] += 1
            self._close()
            self._come_back()

    def _come_back(self, longest_s: float = LONGEST_ABSENCE_S) -> None:
        if self._away_since_s is None:
            self._away_since_s = self._world.timeline.now_s
        delay_s = self._world.rng.random() * longest_s
        self._world.timeline.push(delay_s, None, "", self._resume)

    def _resume(self) -> None:
        """Ask any front end that accepts connections."""
        if self._ledger.streams[self._stream_id].fate is not Fate.OPEN:
            return
        frontend = self._platform.open_frontend()
        if frontend is None:
            self._world.timeline.push(0.1, None, "", self._resume)
            return
        connection = self._connect(frontend, is_new=False)
        assert frontend.streams is not None
        reading = frontend.streams.reading
        what = f"is asked for {self._stream_id} behind {connection.last}"
        self._world.timeline.push(0.0, frontend, what, lambda: reading.read(connection))

    # ------------------------------------------------------------------------------- answers

    def on_start(self, connection: Connection, status: int) -> None:
        """See `Client`."""
        if status == OK:
            self._away_since_s = None
            return
        self._connection = None
        if status == NOT_FOUND:
            now_s, since_s = self._world.timeline.now_s, self._away_since_s
            self._ledger.on_unknown(self._stream_id, 0.0 if since_s is None else now_s - since_s)
        elif status == UNAVAILABLE:
            self._world.counts["stream: try again"] += 1
            self._come_back(1.0)

    def on_events(self, connection: Connection, content: bytes) -> None:
        """See `Client`."""
        for text, event in _EVENT.findall(content):
            last = event_id_of(text.decode())
            assert last is not None
            self._ledger.on_event(self._stream_id, last.number, event)
            self._last = connection.last = last

    def on_end(self, connection: Connection) -> None:
        """See `Client`."""
        self._connection = None
        if self._ledger.streams[self._stream_id].fate is Fate.OPEN:
            raise Violation(f"the answer of {self._stream_id} is over before its last event")

    def on_broken(self, connection: Connection) -> None:
        """See `Client`."""
        if connection is self._connection:
            self._connection = None
            self._world.counts["stream: connection broken"] += 1
            self._come_back()
