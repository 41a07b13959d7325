"""A sequence of faults on a server under streams, with moves of requests between them."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from bench.chaos.clients import Answer, Question, ask, session_of
from bench.chaos.faults import (
    CUT,
    DEADLY,
    FAULTS,
    HOLDS_STREAMS,
    INSTANCE,
    KILL,
    MARKS,
    STOP,
    STOPPED_S,
    Fault,
    Processes,
    cut,
    kill,
    stopped,
)
from bench.chaos.report import Move
from bench.serving.target import Target
from sterna.types import RequestId

WEIGHTS = dict.fromkeys(FAULTS, 1) | {
    "kill-instance": 3,
    "stop-instance": 2,
    "cut-instance": 2,
    "kill-front-end": 2,
}
"""Relative frequencies of the faults."""

NUM_INSTANCES = 2
NUM_OF = {"front-end": 2}
"""Components with several processes."""

NUM_VISITS = 3
VISIT_INTERVAL_S = 1.0
VISIT_TOKENS = 5
"""Times of the short requests after the failure of a component that only manages, the first at
once. They show the wait of new clients for the first token."""

HELD = "held"
"""The state of a request that waits at the scheduler."""

MOVE_INTERVAL_S = 3.0
LOOK_INTERVAL_S = 0.25
WHOLE_TIMEOUT_S = 180.0
POLL_S = 0.1
NOTICE_TIMEOUT_S = 20.0
NOTICE_POLL_S = 0.02


@dataclass(slots=True)
class Storm:
    """Streams, faults and moves on one server, side by side.

    Attributes:
        log: the server's log, which names its processes.
        asked: the questions of its clients, sent repeatedly.
        visits: short questions, sent after a fault.
        kinds: the kinds of faults that are drawn.
        num_streams: at once.
        pause_s: shortest and longest time from one fault to the next; more where the server takes
            longer to become whole again.
        seed: of all random draws.
        held: the requests that were seen waiting at the scheduler.
        is_calm: whether the server is whole at the moment.
    """

    target: Target
    log: Path
    asked: Sequence[Question]
    visits: Sequence[Question]
    kinds: Sequence[str]
    num_streams: int
    pause_s: tuple[float, float]
    seed: int
    answers: list[Answer] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    held: set[RequestId] = field(default_factory=set)
    is_calm: bool = True

    async def run(self, duration_s: float) -> None:
        """Run until the time is over and all streams have ended."""
        over = asyncio.Event()
        draws = Random(self.seed)
        async with (
            session_of(self.target) as streams,
            self.target.session(timeout=aiohttp.ClientTimeout(total=10.0)) as operator,
            asyncio.TaskGroup() as group,
        ):
            for worker in range(self.num_streams):
                group.create_task(self._stream(streams, worker, over))
            moving = group.create_task(self._move(operator, draws))
            looking = group.create_task(self._look(operator))
            await self._hit(
                operator,
                lambda: group.create_task(self._visit(streams)),
                draws,
                now_s() + duration_s,
            )
            moving.cancel()
            looking.cancel()
            over.set()

    async def _stream(
        self, session: aiohttp.ClientSession, worker: int, over: asyncio.Event
    ) -> None:
        number = worker
        while not over.is_set():
            answer = await self._ask(session, self.asked[number % len(self.asked)])
            number += self.num_streams
            if answer.error is not None:
                say(f"  failed: {answer.question.kind}: {answer.error}")
                # Do not flood a server that refuses everything.
                await asyncio.sleep(1.0)

    async def _visit(self, session: aiohttp.ClientSession) -> None:
        """Send short requests, whether the previous ones have been answered or not."""
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_VISITS):
                if number:
                    await asyncio.sleep(VISIT_INTERVAL_S)
                question = self.visits[len(self.answers) % len(self.visits)]
                group.create_task(self._ask(session, question))

    async def _ask(self, session: aiohttp.ClientSession, question: Question) -> Answer:
        answer = Answer(question, now_s(), f"chaos-{len(self.answers)}")
        self.answers.append(answer)
        await ask(session, self.target, answer)
        return answer

    # ----------------------------------------------------------------------------- faults

    async def _hit(
        self,
        session: aiohttp.ClientSession,
        visit: Callable[[], object],
        draws: Random,
        end_s: float,
    ) -> None:
        """Inject one fault after the other, each when the server is whole again."""
        kinds = self._drawn(draws)
        due_s = now_s()
        while (due_s := max(now_s(), due_s + draws.uniform(*self.pause_s))) < end_s:
            await asyncio.sleep(due_s - now_s())
            kind = next(kinds)
            chosen = await self._choose(session, kind, draws)
            if chosen is not None:
                self.is_calm = False
                fault = await self._do(session, visit, kind, *chosen)
                self.faults.append(fault)
                back = "-" if fault.back_s is None else f"{fault.back_s:.1f}"
                say(f"  whole again after {back} s")
                self.is_calm = True

    def _drawn(self, draws: Random) -> Iterator[str]:
        """Kinds of faults, by their weights; none is left out for long."""
        while True:
            bag = [each for each in self.kinds for _ in range(WEIGHTS[each])]
            draws.shuffle(bag)
            yield from bag

    async def _choose(
        self, session: aiohttp.ClientSession, kind: str, draws: Random
    ) -> tuple[str, psutil.Process] | None:
        """Return the victim of the fault; None where it does not exist."""
        processes = Processes()
        _, component = kind.split("-", 1)
        if component != INSTANCE:
            found = processes.marked(MARKS[component])
            if len(found) < NUM_OF.get(component, 1):
                return None
            return component, draws.choice(found) if component in NUM_OF else found[0]
        serving = await self._serving(session)
        if len(serving) < NUM_INSTANCES:
            return None
        victim = draws.choice(sorted(serving))
        process = processes.of_instance(victim, self._pids())
        return None if process is None else (victim, process)

    async def _do(
        self,
        session: aiohttp.ClientSession,
        visit: Callable[[], object],
        kind: str,
        victim: str,
        process: psutil.Process,
    ) -> Fault:
        affected = await self._requests_on(session, victim)
        at_s = now_s()
        deed, component = kind.split("-", 1)
        of_requests = f", with {len(affected)} requests" if component == INSTANCE else ""
        say(f"{deed} {victim}{of_requests}")
        noticed_s: float | None = None
        async with contextlib.AsyncExitStack() as stack:
            if deed == STOP:
                stack.enter_context(stopped(process))
                stack.push_async_callback(asyncio.sleep, STOPPED_S)
            elif deed == CUT:
                say(f"  {cut(process)} connections")
            else:
                kill(process)
            if component not in HOLDS_STREAMS:
                visit()
            if kind in DEADLY:
                noticed_s = await self._until_noticed(session, victim, at_s)
        back_s = await self._until_whole(session, victim, at_s, kind, process)
        return Fault(kind, victim, at_s, back_s, tuple(affected), noticed_s)

    async def _until_noticed(
        self, session: aiohttp.ClientSession, victim: str, at_s: float
    ) -> float | None:
        """Wait until the server no longer counts on the instance; returns the time."""
        while now_s() < at_s + NOTICE_TIMEOUT_S:
            serving = await self._serving(session)
            if serving and victim not in serving:
                return now_s() - at_s
            await asyncio.sleep(NOTICE_POLL_S)
        return None

    async def _until_whole(
        self,
        session: aiohttp.ClientSession,
        victim: str,
        at_s: float,
        kind: str,
        process: psutil.Process,
    ) -> float | None:
        """Wait until two instances serve and the process that was hit, or its successor where it
        was killed, is active and not in reserve; returns the time."""
        processes = Processes()
        deed, component = kind.split("-", 1)
        is_done_again = component == INSTANCE
        while now_s() < at_s + WHOLE_TIMEOUT_S:
            await asyncio.sleep(POLL_S)
            if not is_done_again:
                found = processes.marked(MARKS[component])
                those = [each for each in found if deed != KILL or each != process]
                is_done_again = len(those) >= NUM_OF.get(component, 1)
                continue
            serving = await self._serving(session)
            if len(serving) >= NUM_INSTANCES and not (kind in DEADLY and victim in serving):
                return now_s() - at_s
        return None

    # ------------------------------------------------------------------------------ moves

    async def _move(self, session: aiohttp.ClientSession, draws: Random) -> None:
        """Move a request from one instance to another now and then, while the server is whole."""
        while True:
            await asyncio.sleep(MOVE_INTERVAL_S)
            if not self.is_calm:
                continue
            requests = await self._requests(session)
            instances = [each["id"] for each in await self._instances(session)]
            decoding = [each for each in requests if each.get("num_output_tokens", 0) > 4]
            if not decoding or len(instances) < 2:
                continue
            chosen = draws.choice(sorted(decoding, key=lambda each: str(each["id"])))
            other = next(each for each in instances if each != chosen["instance"])
            body = {"request": chosen["id"], "to": other}
            begin_s = now_s()
            try:
                async with session.post(f"{self.target.url}/admin/migrate", json=body) as answer:
                    is_done = answer.status == 200 and self.is_calm
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
            if is_done:
                self.moves.append(Move(RequestId(chosen["id"]), begin_s, now_s()))

    # ------------------------------------------------------------------------- what there is

    async def _look(self, session: aiohttp.ClientSession) -> None:
        """Look for held requests, which no instance knows of."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.held.update(
                RequestId(each["id"])
                for each in await self._requests(session)
                if each.get("status") == HELD
            )

    async def _serving(self, session: aiohttp.ClientSession) -> set[str]:
        instances = await self._instances(session)
        return {str(each["id"]) for each in instances if each["state"] == "running"}

    async def _instances(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return await self._listed(session, "instances")

    async def _requests(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return await self._listed(session, "requests")

    async def _requests_on(
        self, session: aiohttp.ClientSession, instance_id: str
    ) -> list[RequestId]:
        requests = await self._requests(session)
        return [RequestId(each["id"]) for each in requests if each["instance"] == instance_id]

    async def _listed(self, session: aiohttp.ClientSession, what: str) -> list[dict[str, Any]]:
        """The instances; none where the server cannot report them at the moment."""
        try:
            async with session.get(f"{self.target.url}/admin/{what}") as answer:
                found: list[dict[str, Any]] = await answer.json() if answer.status == 200 else []
                return found
        except (aiohttp.ClientError, OSError, TimeoutError):
            return []

    def _pids(self) -> dict[str, int]:
        text = self.log.read_text("utf-8", "replace")
        return {name: int(pid) for name, pid in re.findall(r"instance (i\d+) pid=(\d+)", text)}


def now_s() -> float:
    """The time by the clock of all measurements."""
    return asyncio.get_running_loop().time()


def say(line: str) -> None:
    """Print one line on stderr."""
    print(line, file=sys.stderr, flush=True)
