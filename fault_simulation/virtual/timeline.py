"""The timeline of virtual time: events to come, and a record of those that have happened."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b

Action = Callable[[], None]

TRACE_LENGTH = 400
"""The last events that a failure shows."""

MAX_EVENTS_AT_ONCE = 2000
"""More events at one and the same time are an endless loop."""


class Violation(AssertionError):
    """A promise was broken; the message says which, and by which process."""


class Process:
    """Something that runs, may hang, and dies once.

    Attributes:
        name: never used again; also the address of its mailbox.
        crash_after: number of effects after which it dies in place of the next; None: it does not.
        went_on_s: when it last continued after a hang.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_hung = False
        self.crash_after: int | None = None
        self.went_on_s = 0.0
        # The events that would have happened to it while it hung, in order.
        self.frozen: list[tuple[object, Action]] = []


class Crashed(Exception):
    """The process dies in the middle of what it does."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.name)
        self.process = process


class Timeline:
    """A heap of events in the order of their times, then of their entry.

    An event that belongs to a process that is dead does not happen; one of a process that hangs
    happens when the process continues.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Process | None, object, Action]] = []
        self._num_entered = 0
        self._num_at_once = 0
        self._hash = blake2b(digest_size=8)
        self._trace: deque[tuple[int, float, str, object]] = deque(maxlen=TRACE_LENGTH)

    def push(self, delay_s: float, owner: Process | None, what: object, action: Action) -> None:
        """Let `action` happen after the delay; `what` names it in the trace."""
        self.push_at(self.now_s + delay_s, owner, what, action)

    def push_at(self, time_s: float, owner: Process | None, what: object, action: Action) -> None:
        """Let `action` happen at that time, or at once if the time is over."""
        self._num_entered += 1
        time_s = max(time_s, self.now_s)
        heapq.heappush(self._heap, (time_s, self._num_entered, owner, what, action))

    @property
    def next_s(self) -> float | None:
        """The time of the next event."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> tuple[Process | None, object, Action]:
        """Go on to the next event and take it out.

        Raises:
            Violation: time stands still.
        """
        time_s, _, owner, what, action = heapq.heappop(self._heap)
        self._num_at_once = self._num_at_once + 1 if time_s == self.now_s else 0
        if self._num_at_once > MAX_EVENTS_AT_ONCE:
            raise Violation(f"a process acts without end: {owner and owner.name}, {what}")
        self.now_s = time_s
        return owner, what, action

    def note(self, name: str, what: object) -> None:
        """Record that this happened to the process of this name."""
        self.num_events += 1
        kind = what if isinstance(what, str) else type(what).__name__
        self._hash.update(f"{self.now_s!r} {name} {kind}\n".encode())
        self._trace.append((self.num_events, self.now_s, name, what))

    @property
    def digest(self) -> str:
        """A hash of all recorded events."""
        return self._hash.hexdigest()

    def trace(self) -> Iterator[str]:
        """The last events, a line each."""
        for number, now_s, name, what in self._trace:
            yield f"{number:>7} {now_s:10.6f} {name:<6} {what}"
