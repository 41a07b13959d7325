"""Requests on a server while a fault happens, and what their clients see of it.

Streams that follow each other, and short new requests at a fixed pace, run from before the fault to
the end of the watch. A client whose stream is cut does not resume it.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.chaos.clients import PLAIN_KINDS, Answer, Question, ask, questions, session_of
from bench.chaos.faults import MARKS, Processes
from bench.serving.target import Target

SERVE_MARK = "sterna serve"
"""Part of the command line of the server's own process."""

STREAM_TOKENS = (60, 120, 240, 360)
SHORT_TOKENS = 4
"""Lengths of streams, in turn, and of the short requests."""

SHORT_INTERVAL_S = 0.25
SHORT_TIMEOUT_S = 5.0
"""Time from one short request to the next, and for the answer to one."""

PAUSE_S = 1.0
"""Time after which a client sends the next stream when one was refused or cut."""

POLL_S = 0.1
WARM_UP_S = 5.0
AFTERMATH_S = 2.0
"""Time for which a server that has ended is watched."""


@dataclass(frozen=True, slots=True)
class Load:
    """The number of streams at a time."""

    num_streams: int = 8


@dataclass(slots=True)
class Scene:
    """A server under requests, for a fault.

    Attributes:
        log: the file of the server's output, which names its processes.
        start_s: time that the server took to start.
        lost: instances that the fault has killed.
    """

    target: Target
    log: Path
    start_s: float
    lost: list[str] = field(default_factory=list)

    def server(self) -> psutil.Process | None:
        """The process of `sterna serve`; None when it has ended."""
        return next(iter(Processes().marked(SERVE_MARK)), None)

    def instance(self, instance_id: str) -> psutil.Process | None:
        """The process of an instance."""
        text = self.log.read_text("utf-8", "replace")
        pids = {name: int(pid) for name, pid in re.findall(r"instance (i\d+) pid=(\d+)", text)}
        return Processes().of_instance(instance_id, pids)

    async def running(self) -> set[str]:
        """The instances that run; none where the server does not answer."""
        url = f"{self.target.url}/admin/instances"
        timeout = aiohttp.ClientTimeout(total=SHORT_TIMEOUT_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self.target.session(timeout) as session, session.get(url) as answer:
                if answer.status == 200:
                    return {e["id"] for e in await answer.json() if e["state"] == "running"}
        return set()


Strike = Callable[[Scene], Coroutine[Any, Any, None]]
"""A fault. It may last: at the end of the watch it is cancelled."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What clients saw of one fault, and what came of it.

    Attributes:
        start_s: time that the server had taken to start.
        streams: the number of streams that were open at the fault or began after it.
        cut: those that ended with an error.
        short: the number of short requests after the fault.
        refused: those that got an error, or no answer in time.
        unserved_s: time from the first refused one to the first one that was answered after the
            last refused one, or to the end of the watch.
        is_served: whether the last short request was answered.
        silence_s: the longest time in which a stream that was not cut got no token.
        first_token_s: the waits of the answered short requests.
        replaced_s: time until as many instances as before ran without those that the fault has
            killed; None where that did not happen, or it has killed none.
        migrations: the number of migrations that committed.
        frontend_bytes: growth of the memory of all front ends together.
        ended_s: time until the server ended; None where it did not.
    """

    start_s: float
    streams: int
    cut: int
    short: int
    refused: int
    unserved_s: float
    is_served: bool
    silence_s: float
    first_token_s: tuple[float, ...]
    replaced_s: float | None
    migrations: int
    frontend_bytes: int
    ended_s: float | None

    def json(self) -> dict[str, Any]:
        """All of it but the single waits."""
        return {key: value for key, value in asdict(self).items() if key != "first_token_s"}


async def watch(scene: Scene, load: Load, strike: Strike, watch_s: float) -> Observation:
    """Send requests, strike, and return what their clients saw until this time after it."""
    streams: list[Answer] = []
    shorts: list[Answer] = []
    async with session_of(scene.target) as session, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_stream(session, scene.target, streams, number))
            for number in range(load.num_streams)
        ]
        tasks.append(group.create_task(_send_short(session, scene.target, shorts)))
        await asyncio.sleep(WARM_UP_S)
        num_before = len(await scene.running())
        log_bytes = scene.log.stat().st_size
        memory_before = _frontend_bytes()
        at_s = now_s()
        striking = group.create_task(strike(scene))
        replaced_s: float | None = None
        ended_s: float | None = None
        most_bytes = memory_before
        end_s = at_s + watch_s
        while now_s() < end_s:
            await asyncio.sleep(POLL_S)
            most_bytes = max(most_bytes, _frontend_bytes())
            if scene.server() is None:
                ended_s = now_s() - at_s
                await asyncio.sleep(AFTERMATH_S)
                break
            if scene.lost and replaced_s is None:
                running = await scene.running()
                if len(running) >= num_before and not running & set(scene.lost):
                    replaced_s = now_s() - at_s
        end_s = now_s()
        for task in (*tasks, striking):
            task.cancel()
    # What the group had to cancel is no error of the server.
    with scene.log.open("rb") as log:
        log.seek(log_bytes)
        num_migrations = log.read().count(b"migration committed")
    return observed(
        streams,
        shorts,
        at_s,
        end_s,
        start_s=scene.start_s,
        replaced_s=replaced_s,
        migrations=num_migrations,
        frontend_bytes=most_bytes - memory_before,
        ended_s=ended_s,
    )


def observed(
    streams: Sequence[Answer], shorts: Sequence[Answer], at_s: float, end_s: float, **rest: Any
) -> Observation:
    """What clients saw from `at_s` to `end_s`.

    Args:
        rest: the other attributes of `Observation`.
    """

    def is_of_fault(answer: Answer) -> bool:
        return answer.ended_s is None or answer.ended_s > at_s

    def is_stream(answer: Answer) -> bool:
        # What is refused after the fault has never been a stream.
        return answer.error is None or answer.sent_s <= at_s or bool(answer.times_s)

    hit = [each for each in streams if is_of_fault(each) and is_stream(each)]
    asked = [each for each in shorts if is_of_fault(each) and not _is_unfinished(each)]
    refused = [each for each in asked if each.error is not None]
    answered_s = [each.sent_s for each in asked if each.error is None]
    unserved_s = 0.0
    if refused:
        again_s = [sent_s for sent_s in answered_s if sent_s > refused[-1].sent_s]
        unserved_s = min(again_s, default=end_s) - refused[0].sent_s
    waits_s = [each.wait_s for each in asked if each.error is None]
    return Observation(
        streams=len(hit),
        cut=sum(each.error is not None for each in hit),
        short=len(asked),
        refused=len(refused),
        unserved_s=unserved_s,
        is_served=bool(asked) and asked[-1].error is None,
        silence_s=max((silence_s(e, at_s, end_s) for e in hit if e.error is None), default=0.0),
        first_token_s=tuple(each for each in waits_s if each is not None),
        **rest,
    )


def silence_s(answer: Answer, begin_s: float, end_s: float) -> float:
    """The longest time without a token of a stream, or before its first one, that overlaps this
    interval."""
    times_s = sorted(each for times_s in answer.times_s.values() for each in times_s)
    moments_s = [answer.sent_s, *times_s, *([end_s] if answer.ended_s is None else [])]
    return max(
        (after - before for before, after in pairwise(moments_s) if after > begin_s), default=0.0
    )


def _is_unfinished(answer: Answer) -> bool:
    return answer.error is None and answer.ended_s is None


async def _stream(
    session: aiohttp.ClientSession, target: Target, answers: list[Answer], worker: int
) -> None:
    number = worker
    while True:
        max_tokens = STREAM_TOKENS[number % len(STREAM_TOKENS)]
        number += 1
        answer = Answer(_question(target, len(answers), max_tokens), now_s())
        answers.append(answer)
        await ask(session, target, answer)
        if answer.error is not None:
            await asyncio.sleep(PAUSE_S)


async def _send_short(
    session: aiohttp.ClientSession, target: Target, answers: list[Answer]
) -> None:
    """Send short requests, whether the previous ones have been answered or not."""
    async with asyncio.TaskGroup() as group:
        while True:
            answer = Answer(_question(target, len(answers), SHORT_TOKENS), now_s())
            answers.append(answer)
            group.create_task(_ask_in_time(session, target, answer))
            await asyncio.sleep(SHORT_INTERVAL_S)


async def _ask_in_time(session: aiohttp.ClientSession, target: Target, answer: Answer) -> None:
    try:
        async with asyncio.timeout(SHORT_TIMEOUT_S):
            await ask(session, target, answer)
    except TimeoutError:
        answer.error = f"no answer in {SHORT_TIMEOUT_S:g} s"
        answer.ended_s = now_s()


def _question(target: Target, number: int, max_tokens: int) -> Question:
    (question,) = questions(target.model, 1, max_tokens, 1, PLAIN_KINDS, first=number)
    return question


def _frontend_bytes() -> int:
    num_bytes = 0
    for process in Processes().marked(MARKS["front-end"]):
        with contextlib.suppress(psutil.Error):
            num_bytes += process.memory_info().rss
    return num_bytes


def now_s() -> float:
    """The time by the clock of all measurements."""
    return asyncio.get_running_loop().time()
