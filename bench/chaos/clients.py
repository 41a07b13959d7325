"""Streams whose every token is known beforehand, and the client's observations of each.

Each request is answered once by one undisturbed engine; every later answer must be equal, whatever
happens to the instances meanwhile. Greedy requests, seeded ones, with penalties and log
probabilities, with two answers, and with a grammar take turns.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np

from bench.serving.client import END, EventReader
from bench.serving.prompts import PROMPT_TOKEN_IDS
from bench.serving.target import Target, refusal

PROMPT_TOKENS = 24

SHARED_TOKENS = 160
"""Tokens with which the prompts of every other turn of all kinds begin: five blocks of the prefix
caches, so that some requests are dispatched by what is cached."""

STREAM_TIMEOUT_S = 120.0
"""A stream without data for this time has failed."""
COME_BACK_S = 0.1
"""Time between the attempts of a client to reconnect."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 0.8, "ignore_eos": True},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "logprobs": 2,
        "ignore_eos": True,
    },
    "two answers": {"temperature": 0.7, "n": 2, "ignore_eos": True},
    "grammar": {
        "temperature": 0.0,
        "structured_outputs": {"regex": "([A-Z][a-z]{2,8} [0-9]{1,4}, ){80}"},
    },
}
PLAIN_KINDS = ("greedy", "seeded")
"""The kinds that an engine without a model can answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request with one right answer."""

    number: int
    kind: str
    body: dict[str, Any]


def questions(
    model: str, count: int, max_tokens: int, seed: int, kinds: Sequence[str], first: int = 0
) -> list[Question]:
    """`count` questions, of all kinds in turn, numbered from `first` on."""
    found = []
    shared = np.random.default_rng(seed).integers(*PROMPT_TOKEN_IDS, SHARED_TOKENS).tolist()
    for number in range(first, first + count):
        kind = kinds[number % len(kinds)]
        draws = np.random.default_rng([seed, number])
        own = draws.integers(*PROMPT_TOKEN_IDS, PROMPT_TOKENS).tolist()
        begins_alike = number // len(kinds) % 2 == 0
        body = {
            "model": model,
            "prompt": [*(shared if begins_alike else ()), *own],
            "max_tokens": max_tokens,
            "seed": number,
            "stream": True,
            "return_token_ids": True,
            **KINDS[kind],
        }
        found.append(Question(number, kind, body))
    return found


@dataclass(slots=True)
class Answer:
    """The observed answer to one request. Times are by the loop's clock.

    Attributes:
        request_id: its id for resuming after a broken connection; None: not resumable.
        response_id: the server's id; None until the first event.
        tokens: of each choice, by its index.
        times_s: the times of the events of each choice.
        finished: the choices that have ended.
        last_id: the server's id of the last event; "0" without one.
        num_breaks: number of reconnections.
        is_resuming: whether it asks for the rest of a stream that the server should have.
        error: None when the stream ended correctly.
    """

    question: Question
    sent_s: float
    request_id: str | None = None
    response_id: str | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    last_id: str = "0"
    num_breaks: int = 0
    is_resuming: bool = False
    error: str | None = None
    ended_s: float | None = None

    @property
    def last_news_s(self) -> float:
        """The time of the last event, or of the sending."""
        return max((times_s[-1] for times_s in self.times_s.values()), default=self.sent_s)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its next connection."""
        if self.request_id is None:
            return {}
        last = {"Last-Event-ID": self.last_id} if self.is_resuming else {}
        return {"X-Request-Id": self.request_id, **last}

    @property
    def wait_s(self) -> float | None:
        """The wait for the first event; None without an event."""
        first_s = min((times_s[0] for times_s in self.times_s.values()), default=None)
        return None if first_s is None else first_s - self.sent_s

    def gap_s(self, index: int, begin_s: float, end_s: float) -> float | None:
        """The longest time from one event of a choice to the next that overlaps this interval;
        None where it has none."""
        gaps = [
            after - before
            for before, after in pairwise(self.times_s[index])
            if before < end_s and after > begin_s
        ]
        return max(gaps, default=None)


@dataclass(frozen=True, slots=True)
class Differences:
    """The difference of an answer from the right one, in tokens."""

    lost: int = 0
    repeated: int = 0
    changed: int = 0


def differences(expected: Sequence[int], found: Sequence[int]) -> Differences:
    """Compare two token sequences: missing, repeated and changed tokens.

    Tokens are missing where the answer continues correctly after them, and repeated where it
    continues correctly from before them.
    """
    if list(expected) == list(found):
        return Differences()
    same = 0
    for one, other in zip(expected, found, strict=False):
        if one != other:
            break
        same += 1
    rest_expected, rest_found = list(expected[same:]), list(found[same:])
    shorter = len(rest_expected) - len(rest_found)
    if shorter > 0 and rest_expected[shorter:] == rest_found:
        return Differences(lost=shorter)
    if shorter < 0 and rest_found[-shorter:] == rest_expected:
        return Differences(repeated=-shorter)
    return Differences(changed=max(len(rest_expected), len(rest_found)))


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_EVENTS = msgspec.json.Decoder(_Event)


async def ask(session: aiohttp.ClientSession, target: Target, answer: Answer) -> None:
    """Send the request, and follow its stream to any end."""
    try:
        while not await _follow(session, target, answer):
            answer.num_breaks += 1
            answer.is_resuming = True
            await asyncio.sleep(COME_BACK_S)
    except TimeoutError:
        answer.error = f"nothing came for {STREAM_TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        answer.error = str(error) or type(error).__name__
    answer.ended_s = _now_s()


async def _follow(session: aiohttp.ClientSession, target: Target, answer: Answer) -> bool:
    """Read the stream over one connection; False: it broke, and the stream can be resumed."""
    try:
        return await _read(session, target, answer)
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError):
        if answer.request_id is None or _now_s() > answer.last_news_s + STREAM_TIMEOUT_S:
            raise
        return False


async def _read(session: aiohttp.ClientSession, target: Target, answer: Answer) -> bool:
    url, body = f"{target.url}/v1/completions", answer.question.body
    async with session.post(url, json=body, headers=answer.headers) as response:
        if response.status == 503 and answer.is_resuming:
            # The stream has no holder yet.
            raise aiohttp.ClientConnectionError(refusal(503, await response.read()))
        if response.status == 404 and answer.is_resuming and answer.last_id == "0":
            # The connection broke before the request was accepted.
            answer.is_resuming = False
            return await _read(session, target, answer)
        if response.status != 200:
            answer.error = refusal(response.status, await response.read())
            return True
        reader = EventReader()
        async for piece in response.content.iter_any():
            now_s = _now_s()
            for data in reader.feed(piece):
                if data == END:
                    continue
                event = _EVENTS.decode(data)
                if event.error is not None:
                    answer.error = str(event.error.get("message", event.error))
                answer.response_id = event.id or answer.response_id
                for choice in event.choices:
                    answer.tokens.setdefault(choice.index, []).extend(choice.token_ids or ())
                    answer.times_s.setdefault(choice.index, []).append(now_s)
                    if choice.finish_reason is not None:
                        answer.finished.add(choice.index)
            answer.last_id = reader.last_id or answer.last_id
    if answer.error is None and len(answer.finished) != body.get("n", 1):
        answer.error = "the stream ended before its answer did"
    return True


async def ask_all(target: Target, asked: Sequence[Question], *, num_at_once: int) -> list[Answer]:
    """The answers to all questions, with `num_at_once` running at a time."""
    answers: list[Answer] = []
    waiting = list(reversed(asked))

    async def work(session: aiohttp.ClientSession) -> None:
        while waiting:
            answer = Answer(waiting.pop(), _now_s())
            answers.append(answer)
            await ask(session, target, answer)

    async with session_of(target) as session, asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(work(session))
    return answers


def session_of(target: Target) -> aiohttp.ClientSession:
    """Connections for streams."""
    return target.session(
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=STREAM_TIMEOUT_S, sock_read=STREAM_TIMEOUT_S
        )
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
