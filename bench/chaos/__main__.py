"""Hits the processes of a real server, one at a time, while streams run whose every token is known.

The right answers come from a lone engine. Then, for `--minutes`, one fault after the other is done
to a server of two instances: an instance is killed, stopped, or cut off from everybody; the
scheduler, the supervisor, the driver or Ray's GCS is killed. Between two of them the server has
become whole again, and requests are moved on purpose. Everything in float32, in which what shares a
batch does not change what is generated.

    sterna bench chaos [--minutes 10] [--quick]

`bench/results/chaos.json` has a `summary` (`requests, failed, tokens_lost, tokens_repeated,
tokens_changed, gap_s`) and a row for each kind of fault.
"""

import argparse
import asyncio
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from bench import results_io
from bench.chaos.clients import (
    KINDS,
    PLAIN_KINDS,
    Answer,
    Question,
    ask,
    ask_all,
    questions,
    session_of,
)
from bench.chaos.faults import MARKS, STOPPED_S, Fault, Processes, cut, kill, stopped
from bench.chaos.report import Move, markdown, rows_of, summary_of
from bench.command import end_like_ctrl_c, ended, positive
from bench.marked_text import write_marked
from bench.serving.comparing import PAGE, QUICK_FOLDER
from bench.serving.measured import LOGS
from bench.serving.served import served
from bench.serving.target import Target, find_target
from sterna.errors import ConfigurationError

NAME = "chaos"
COMMAND = f"sterna bench {NAME}"

INSTANCE_FAULTS = ("kill", "stop", "cut")
FAULTS = (*INSTANCE_FAULTS, *MARKS)
WEIGHTS = (3, 2, 2, 1, 1, 1, 1)

FLOAT32 = ("--dtype", "float32", "--max-model-len", "2048")
"""For longer sequences an instance would need more memory than it takes by default."""

CALM_S = (6.0, 12.0)
"""Between the moment when the server is whole again and the next fault."""

MOVE_INTERVAL_S = 3.0
WHOLE_TIMEOUT_S = 180.0
POLL_S = 0.1
RECOVERY_S = 3.0
"""A gap that began within so long after a fault is laid at its door."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)g")
    parser.add_argument("--streams", type=positive, default=6, help="at once (default: 6)")
    parser.add_argument("--tokens", type=positive, default=300, help="of each (default: 300)")
    parser.add_argument("--questions", type=positive, default=25, help="default: 25")
    parser.add_argument("--seed", type=int, default=1, help="of faults and prompts (default: 1)")
    parser.add_argument(
        "--only", nargs="+", choices=FAULTS, default=FAULTS, help="kinds of faults (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a minute on emulated instances")
    parser.add_argument("--results", type=Path, help="folder of the result file")
    options = parser.parse_args(argv)
    end_like_ctrl_c()
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    log = LOGS / NAME / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    engine = ["--engine", "emulated"] if options.quick else [*FLOAT32]
    kinds = PLAIN_KINDS if options.quick else tuple(KINDS)
    minutes = 1.0 if options.quick else options.minutes
    with served([*engine, "--instances", "1"], log=log.with_name("lone.log")) as url:
        target = asyncio.run(find_target(url))
        asked = questions(target.model, options.questions, options.tokens, options.seed, kinds)
        _say(f"{len(asked)} questions to a lone engine")
        known = asyncio.run(ask_all(target, asked, num_at_once=4))
    expected = {each.question.number: each.tokens for each in known}
    failed = [each.error for each in known if each.error is not None]
    if failed:
        raise ConfigurationError(f"the lone engine did not answer: {failed[0]}")
    with served([*engine, "--instances", "2"], log=log) as url:
        target = asyncio.run(find_target(url))
        _say(f"{minutes:g} minutes of faults on two instances")
        storm = _Storm(target, log, asked, options)
        asyncio.run(storm.run(60.0 * minutes))
    _write(options, storm, expected, minutes, engine)


def _write(
    options: argparse.Namespace,
    storm: "_Storm",
    expected: dict[int, dict[int, list[int]]],
    minutes: float,
    engine: list[str],
) -> None:
    rows = rows_of(storm.faults, storm.moves, storm.answers, RECOVERY_S)
    summary = summary_of(rows, storm.answers, expected)
    config = {
        "server": [*engine, "--instances", "2"],
        "minutes": minutes,
        "streams": options.streams,
        "tokens": options.tokens,
        "questions": options.questions,
        "faults": list(options.only),
        "seed": options.seed,
    }
    folder = options.results or (QUICK_FOLDER if options.quick else results_io.RESULTS)
    errors = sorted({each.error for each in storm.answers if each.error is not None})
    path = results_io.write(NAME, config, rows, folder, summary=summary, more={"errors": errors})
    text = markdown(results_io.read(NAME, folder))
    print(text)
    _say(f"wrote {path}")
    if folder.resolve() == results_io.RESULTS:
        write_marked(PAGE, COMMAND, text)


@dataclass(slots=True)
class _Storm:
    """Streams, faults and moves on one server, side by side."""

    target: Target
    log: Path
    asked: Sequence[Question]
    options: argparse.Namespace
    answers: list[Answer] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    is_calm: bool = True

    async def run(self, duration_s: float) -> None:
        """Return when the time is over and all streams have ended."""
        over = asyncio.Event()
        draws = Random(self.options.seed)
        async with (
            session_of(self.target) as streams,
            self.target.session(timeout=aiohttp.ClientTimeout(total=10.0)) as operator,
            asyncio.TaskGroup() as group,
        ):
            for worker in range(self.options.streams):
                group.create_task(self._stream(streams, worker, over))
            moving = group.create_task(self._move(operator, draws))
            try:
                async with asyncio.timeout(duration_s):
                    await self._hit(operator, draws)
            except TimeoutError:
                pass
            moving.cancel()
            over.set()

    async def _stream(
        self, session: aiohttp.ClientSession, worker: int, over: asyncio.Event
    ) -> None:
        number = worker
        while not over.is_set():
            answer = Answer(self.asked[number % len(self.asked)], _now_s())
            self.answers.append(answer)
            await ask(session, self.target, answer)
            number += self.options.streams
            if answer.error is not None:
                _say(f"  failed: {answer.question.kind}: {answer.error}")
                # A server that refuses everything is not to be flooded.
                await asyncio.sleep(1.0)

    # ----------------------------------------------------------------------------- faults

    async def _hit(self, session: aiohttp.ClientSession, draws: Random) -> None:
        processes = Processes()
        weights = [WEIGHTS[FAULTS.index(each)] for each in self.options.only]
        while True:
            await asyncio.sleep(draws.uniform(*CALM_S))
            (kind,) = draws.choices(self.options.only, weights)
            instances = await self._instances(session)
            serving = sorted(each["id"] for each in instances if each["state"] == "running")
            if kind in INSTANCE_FAULTS:
                if len(serving) < 2:
                    continue
                victim = draws.choice(serving)
                process = processes.of_instance(victim, self._pids())
            else:
                victim = kind
                process = processes.marked(MARKS[kind])
            if process is None:
                continue
            affected = await self._responses_on(session, victim)
            self.is_calm = False
            at_s = _now_s()
            _say(f"{kind} {victim}, with {len(affected)} requests")
            async with contextlib.AsyncExitStack() as stack:
                if kind == "stop":
                    stack.enter_context(stopped(process))
                    stack.push_async_callback(asyncio.sleep, STOPPED_S)
                elif kind == "cut":
                    _say(f"  {cut(process)} connections")
                else:
                    kill(process)
            back_s = await self._until_whole(session, victim, at_s, kind, process)
            self.faults.append(Fault(kind, victim, at_s, back_s, tuple(affected)))
            _say(f"  whole again after {'-' if back_s is None else round(back_s, 1)} s")
            self.is_calm = True

    async def _until_whole(
        self,
        session: aiohttp.ClientSession,
        victim: str,
        at_s: float,
        kind: str,
        process: psutil.Process,
    ) -> float | None:
        """Wait until two instances serve, and what was killed has a successor that does its work;
        returns after how long that was so."""
        processes = Processes()
        has_successor = kind not in MARKS
        while _now_s() < at_s + WHOLE_TIMEOUT_S:
            await asyncio.sleep(POLL_S)
            if not has_successor:
                has_successor = processes.marked(MARKS[kind]) not in (None, process)
                continue
            instances = await self._instances(session)
            serving = {each["id"] for each in instances if each["state"] == "running"}
            if len(serving) >= 2 and not (kind in ("kill", "stop") and victim in serving):
                return _now_s() - at_s
        return None

    # ------------------------------------------------------------------------------ moves

    async def _move(self, session: aiohttp.ClientSession, draws: Random) -> None:
        """Move a request from one instance to another now and then, while nothing else happens."""
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
            begin_s = _now_s()
            try:
                async with session.post(f"{self.target.url}/admin/migrate", json=body) as answer:
                    is_done = answer.status == 200 and self.is_calm
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
            if is_done:
                self.moves.append(Move(str(chosen["id"]), begin_s, _now_s()))

    # ------------------------------------------------------------------------- what there is

    async def _instances(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return await self._listed(session, "instances")

    async def _requests(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return await self._listed(session, "requests")

    async def _responses_on(self, session: aiohttp.ClientSession, instance_id: str) -> list[str]:
        ids = [
            str(each["id"])
            for each in await self._requests(session)
            if each["instance"] == instance_id
        ]
        open_ids = {each.response_id for each in self.answers if each.ended_s is None}
        return [each for each in open_ids if each and any(found.startswith(each) for found in ids)]

    async def _listed(self, session: aiohttp.ClientSession, what: str) -> list[dict[str, Any]]:
        """Nothing where the server cannot tell at this moment."""
        try:
            async with session.get(f"{self.target.url}/admin/{what}") as answer:
                found: list[dict[str, Any]] = await answer.json() if answer.status == 200 else []
                return found
        except (aiohttp.ClientError, OSError, TimeoutError):
            return []

    def _pids(self) -> dict[str, int]:
        text = self.log.read_text("utf-8", "replace")
        return {name: int(pid) for name, pid in re.findall(r"instance (i\d+) pid=(\d+)", text)}


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
