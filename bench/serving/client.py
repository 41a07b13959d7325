"""Sends the requests of a trace to an OpenAI-compatible server, each when it is due.

The loop is open: it does not wait for answers, so that a slow server gets no fewer requests. Within
a session it is closed: the next turn, which has the answer in its prompt, comes some time after it.
Requests are streaming completions of prompts of random tokens; the trace gives the number of
generated tokens.
"""

import asyncio
import contextlib
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import nan
from typing import Any

import aiohttp
import msgspec
import numpy as np

from bench.serving.prompts import prompt_of
from bench.serving.target import Target, refusal
from sterna.types import NORMAL, Priority
from sterna.workload.trace import Trace
from sterna.workload.turns import NONE

DEFAULT_TIMEOUT_S = 600.0

NUM_SPARE_FILES = 100
"""Open files of this process besides the streams."""


class PriorityField(Enum):
    """The field of a request's body that carries its urgency."""

    PRIORITY = "priority"
    """vLLM's integer; lower ones are more urgent."""
    SERVICE_TIER = "service-tier"
    """OpenAI's name of a tier."""

    def of(self, priority: Priority) -> dict[str, Any]:
        """The field for a request of this priority."""
        match self:
            case PriorityField.PRIORITY:
                return {"priority": -int(priority)}
            case PriorityField.SERVICE_TIER:
                return {"service_tier": "priority" if priority > NORMAL else "default"}


@dataclass(slots=True)
class Outcome:
    """What the client saw of one request. Times are in seconds since the run began.

    Attributes:
        sent_s: when it was actually sent; a busy client sends late.
        first_token_s: when its first token came; NaN where none did.
        last_token_s: when the last one so far came.
        largest_gap_s: the longest time from one token to the next; NaN for less than two.
        num_tokens: generated, by the server's count; None without a count.
        error: the reason of the failure; None for a complete answer.
        tokens: the generated ids, where they are kept.
        gaps_s: every time from one token to the next, where tokens are kept.
        due_s: when it was to be sent; NaN where its session failed before.
    """

    sent_s: float = nan
    first_token_s: float = nan
    last_token_s: float = nan
    largest_gap_s: float = nan
    num_tokens: int | None = None
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    due_s: float = nan

    def on_token(self, now_s: float) -> None:
        """A piece of the answer came; it may have been several tokens at once."""
        if np.isnan(self.first_token_s):
            self.first_token_s = now_s
        else:
            # fmax ignores NaN.
            self.largest_gap_s = float(np.fmax(self.largest_gap_s, now_s - self.last_token_s))
        self.last_token_s = now_s


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How requests are sent.

    Attributes:
        seed: of the prompts.
        timeout_s: a request fails when nothing has come from the server for this time.
        keeps_tokens: whether outcomes have the tokens, for answers to be compared.
        cache_salt: of all prompts, so that they begin like no prompt of another run with the same
            seed; None where nothing else was sent to the server.
    """

    seed: int
    timeout_s: float = DEFAULT_TIMEOUT_S
    priority_field: PriorityField = PriorityField.PRIORITY
    keeps_tokens: bool = False
    cache_salt: str | None = None


async def replay(
    target: Target,
    trace: Trace,
    config: ClientConfig,
    *,
    begin_s: float,
    on_ended: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Send the trace's requests; returns their outcomes, in its order, when all have ended.

    Args:
        begin_s: when the trace begins, by the loop's clock.
        on_ended: called whenever a request has ended, well or not.
    """

    turns = trace.turns
    following = None if turns is None else turns.next()
    if turns is not None:
        # The next prompts have them.
        config = replace(config, keeps_tokens=True)

    async def send_turns(sender: "_Sender", index: int) -> None:
        """Send a request and, after its answer, the later turns of its session."""
        due_s, before = float(trace.arrival_s[index]), list[int]()
        while True:
            outcome = outcomes[index]
            outcome.due_s = due_s
            body = body_of(target.model, trace, index, config, before)
            await sender.send(body, int(trace.output_tokens[index]), outcome)
            if on_ended is not None:
                on_ended()
            if turns is None or following is None or following[index] == NONE:
                return
            index = int(following[index])
            if outcome.error is not None:
                give_up(index)
                return
            before = [*body["prompt"], *outcome.tokens]
            due_s = outcome.last_token_s + float(turns.think_s[index])
            await asyncio.sleep(max(0.0, begin_s + due_s - loop.time()))

    def give_up(index: int) -> None:
        """Fail this turn of a session, and all later ones."""
        while index != NONE:
            outcomes[index].error = "a turn before it failed"
            if on_ended is not None:
                on_ended()
            assert following is not None
            index = int(following[index])

    allow_files(len(trace) + NUM_SPARE_FILES)
    loop = asyncio.get_running_loop()
    outcomes = [Outcome() for _ in range(len(trace))]
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=config.timeout_s, sock_read=config.timeout_s
    )
    async with (
        target.session(timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        sender = _Sender(session, target, config, begin_s)
        for index, arrival_s in enumerate(trace.arrival_s.tolist()):
            if turns is None or turns.is_first[index]:
                await asyncio.sleep(max(0.0, begin_s + arrival_s - loop.time()))
                group.create_task(send_turns(sender, index))
    return outcomes


def body_of(
    model: str, trace: Trace, index: int, config: ClientConfig, before: Sequence[int] = ()
) -> dict[str, Any]:
    """The completion for the trace's request with this index; `before` as in `prompt_of`."""
    return {
        "model": model,
        "prompt": prompt_of(trace, index, config.seed, before),
        "max_tokens": int(trace.output_tokens[index]),
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"return_token_ids": True} if config.keeps_tokens else {}),
        **({} if config.cache_salt is None else {"cache_salt": config.cache_salt}),
        **config.priority_field.of(Priority(int(trace.priority[index]))),
    }


def allow_files(num_files: int) -> None:
    """Raise the limit of open files to this number, or as far as allowed: each stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# -------------------------------------------------------------------------------------- streams


class Usage(msgspec.Struct):
    """How many tokens a server counted."""

    completion_tokens: int


class ErrorObject(msgspec.Struct):
    """An error after the answer had begun."""

    message: str


class Choice(msgspec.Struct):
    """One piece of an answer: the fields that are read where tokens are kept."""

    token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    """An event of a stream: the fields that are read.

    Attributes:
        choices: one for a piece of the answer; none in the event with the usage.
    """

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: ErrorObject | None = None


END = b"[DONE]"


class EventReader:
    """Cuts bytes as they come into the data of server-sent events.

    OpenAI's events have one line of data each, behind that of their id if they have one; other
    lines are ignored.

    Attributes:
        last_id: that of the last event; "" without one.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self._rest = self._id = b""

    def feed(self, content: bytes) -> list[bytes]:
        """The data of the events whose line is complete with this."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        found = []
        for line in lines:
            if line.startswith(b"id:"):
                self._id = line[3:].strip()
            elif line.startswith(b"data:"):
                self.last_id = self._id.decode()
                found.append(line[5:].strip())
        return found


class _Sender:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        config: ClientConfig,
        begin_s: float,
    ) -> None:
        self._session = session
        self._url = f"{target.url}/v1/completions"
        self._config = config
        self._begin_s = begin_s
        self._chunks = msgspec.json.Decoder(Chunk)

    async def send(self, body: dict[str, Any], num_tokens: int, outcome: Outcome) -> None:
        """Send one request and follow its stream to any end."""
        outcome.sent_s = self._now_s()
        try:
            await self._follow(body, outcome)
        except TimeoutError:
            outcome.error = f"nothing came for {self._config.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            outcome.error = str(error) or type(error).__name__
        if outcome.error is None and outcome.num_tokens != num_tokens:
            came = "an unknown number" if outcome.num_tokens is None else outcome.num_tokens
            outcome.error = f"cut: {came} of {num_tokens} tokens came"

    async def _follow(self, body: dict[str, Any], outcome: Outcome) -> None:
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=content, headers=headers) as answer:
            if answer.status != 200:
                outcome.error = refusal(answer.status, await answer.read())
                return
            events = EventReader()
            async for piece in answer.content.iter_any():
                now_s = self._now_s()
                for event in events.feed(piece):
                    if event != END:
                        self._note(self._chunks.decode(event), now_s, outcome)

    def _note(self, chunk: Chunk, now_s: float, outcome: Outcome) -> None:
        if chunk.error is not None:
            outcome.error = chunk.error.message
        if chunk.choices:
            last_s = outcome.last_token_s
            outcome.on_token(now_s)
            if self._config.keeps_tokens:
                (choice,) = (msgspec.json.decode(each, type=Choice) for each in chunk.choices)
                outcome.tokens.extend(choice.token_ids or ())
                if not np.isnan(last_s):
                    outcome.gaps_s.append(now_s - last_s)
        if chunk.usage is not None:
            outcome.num_tokens = chunk.usage.completion_tokens

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._begin_s
