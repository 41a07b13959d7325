"""Frames: what the dashboard shows of a cluster at one moment, as small JSON objects. Pure.

    {"t": 12.0,                              seconds of the wall clock, or of the simulation
     "instances": [{"id", "state", "total", "used", "freeness", "running", "queuing", "note",
                    "requests": [[number, tokens], [number, tokens, flags], ...],
                    "more": [number of requests that are not listed, their tokens]}],
     "names": [[number, name], ...],         of requests that no frame has named before
     "held": 3,                              requests that no instance has
     "ttft": [p50, p99], "tpot": [p50, p99], in seconds, of the last seconds; null: of none
     "decisions": [[time, name, event, line], ...], that no frame has had before
     "error": null}                          what could not be asked

A stream begins with a header: {"title": "...", "classes": [[name, rank], ...], "names": [...]}.

`flags` is the index of the request's class in that header, doubled, and one more if the request
queues. A cluster of 16 instances has frames of less than 20 kB, however many requests: the
largest ones of each instance are listed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sterna.dashboard.decisions import newest

Frame = dict[str, Any]

MAX_REQUESTS = 560
"""Requests that a frame lists, of all instances together, as long as each may have a few."""

MIN_REQUESTS = 4
"""Requests of each instance that a frame lists in any case."""

MAX_NAMES = 120
"""Names in a frame; the others come with the next ones."""

MAX_DECISIONS = 24
"""The newest decisions in a frame."""

MAX_NAME_CHARACTERS = 24
"""Longer names keep their beginning and end."""

MAX_LINE_CHARACTERS = 120

NUM_KEPT_FRAMES = 20
"""A request that is in none of this number of frames loses its number. A request on its way from
one instance to another may be in none of a few. The page keeps names for as long."""

INSTANCES_A_SECOND = 16
"""Larger clusters have frames less often, up to `MAX_INTERVAL_S`."""

MAX_INTERVAL_S = 8.0

LATENCY_WINDOW_S = 10.0
"""Time in which first and last tokens count for the percentiles of a frame; on a server longer
where frames are rare."""


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request in the memory of an instance, or in its queue."""

    name: str
    class_name: str
    used_tokens: int
    is_queuing: bool


@dataclass(frozen=True, slots=True)
class ShownInstance:
    """An instance; `freeness` is in decode steps, and None if it is not finite or unknown."""

    name: str
    state: str
    total_tokens: int
    used_tokens: int
    freeness: float | None
    num_running: int
    num_queuing: int
    note: str | None
    requests: Sequence[ShownRequest]


@dataclass(frozen=True, slots=True)
class ShownDecision:
    """A decision about a request: the event, as in `decisions`, and a line about it."""

    time_s: float
    request: str
    event: str
    line: str


@dataclass(slots=True)
class _Number:
    number: int
    last_frame: int


class Frames:
    """Makes the frames of one stream, in the order of time.

    Args:
        title: of the cluster or the simulation.
        class_ranks: the ranks of the cluster's classes of requests, by name; that of most requests
            comes first.
    """

    def __init__(self, title: str, class_ranks: Mapping[str, int]) -> None:
        self._title = title
        self._class_ranks = class_ranks
        self._flags = {name: 2 * index for index, name in enumerate(class_ranks)}
        self._numbers: dict[str, _Number] = {}
        self._unnamed: dict[int, str] = {}
        self._num_given = 0
        self._num_frames = 0
        # The last frame that was given each of the last decisions.
        self._decisions: dict[tuple[float, str, str], int] = {}

    def header(self) -> Frame:
        """What a stream begins with: the names that frames so far have given."""
        names = [
            [each.number, _short(name, MAX_NAME_CHARACTERS)]
            for name, each in self._numbers.items()
            if each.number not in self._unnamed
        ]
        classes = [list(each) for each in self._class_ranks.items()]
        return {"title": self._title, "classes": classes, "names": names}

    def frame(
        self,
        time_s: float,
        instances: Sequence[ShownInstance],
        *,
        num_held: int = 0,
        ttfts_s: Sequence[float] = (),
        tpots_s: Sequence[float] = (),
        decisions: Sequence[ShownDecision] = (),
        error: str | None = None,
    ) -> Frame:
        """The next frame. Decisions may be those of earlier frames, too, oldest first."""
        self._num_frames += 1
        limit = max(MIN_REQUESTS, MAX_REQUESTS // max(1, len(instances)))
        shown = [self._instance(each, limit) for each in instances]
        self._forget()
        named = list(self._unnamed.items())[:MAX_NAMES]
        for number, _ in named:
            del self._unnamed[number]
        return {
            "t": round(time_s, 2),
            "instances": shown,
            "names": [[number, _short(name, MAX_NAME_CHARACTERS)] for number, name in named],
            "held": num_held,
            "ttft": percentiles(ttfts_s),
            "tpot": percentiles(tpots_s),
            "decisions": [
                [
                    round(each.time_s, 2),
                    _short(each.request, MAX_NAME_CHARACTERS),
                    each.event,
                    _short(each.line, MAX_LINE_CHARACTERS),
                ]
                for each in newest(self._new(decisions), MAX_DECISIONS, lambda each: each.event)
            ],
            "error": error,
        }

    def _instance(self, instance: ShownInstance, limit: int) -> Frame:
        # Of equals, the first ones: the choice must not change from frame to frame.
        by_size = sorted(instance.requests, key=lambda each: -each.used_tokens)
        listed = {each.name for each in by_size[:limit]}
        rest = [each for each in instance.requests if each.name not in listed]
        return {
            "id": instance.name,
            "state": instance.state,
            "total": instance.total_tokens,
            "used": instance.used_tokens,
            "freeness": None if instance.freeness is None else round(instance.freeness, 1),
            "running": instance.num_running,
            "queuing": instance.num_queuing,
            "note": None if instance.note is None else _short(instance.note, MAX_LINE_CHARACTERS),
            "requests": [self._request(each) for each in instance.requests if each.name in listed],
            "more": [len(rest), sum(each.used_tokens for each in rest)],
        }

    def _request(self, request: ShownRequest) -> list[int]:
        known = self._numbers.get(request.name)
        if known is None:
            self._num_given += 1
            known = self._numbers[request.name] = _Number(self._num_given, self._num_frames)
            self._unnamed[known.number] = request.name
        known.last_frame = self._num_frames
        flags = self._flags.get(request.class_name, 0) + request.is_queuing
        return [known.number, request.used_tokens, *([flags] if flags else [])]

    def _forget(self) -> None:
        before = self._num_frames - NUM_KEPT_FRAMES
        for name in [name for name, each in self._numbers.items() if each.last_frame <= before]:
            self._unnamed.pop(self._numbers.pop(name).number, None)

    def _new(self, decisions: Iterable[ShownDecision]) -> list[ShownDecision]:
        """Those that the last frames were not given."""
        keyed = {(each.time_s, each.request, each.line): each for each in decisions}
        new = [each for key, each in keyed.items() if key not in self._decisions]
        before = self._num_frames - NUM_KEPT_FRAMES
        self._decisions = {key: last for key, last in self._decisions.items() if last > before}
        self._decisions.update(dict.fromkeys(keyed, self._num_frames))
        return new


def interval_s(num_instances: int) -> float:
    """Seconds between two frames of a cluster of this size."""
    return min(MAX_INTERVAL_S, max(1.0, num_instances / INSTANCES_A_SECOND))


def percentiles(values_s: Sequence[float]) -> list[float] | None:
    """The middle one, and that which 99 % do not exceed; None of none."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    last = len(ordered) - 1
    return [round(ordered[round(share * last)], 5) for share in (0.5, 0.99)]


def _short(text: str, num_characters: int) -> str:
    if len(text) <= num_characters:
        return text
    num_last = num_characters // 3
    return f"{text[: num_characters - num_last - 1]}…{text[-num_last:]}"
