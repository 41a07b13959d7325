"""vLLM's own server, twice: its streams go on at the other front end with the same events."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from bench.serving.ports import free_port

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists

from sterna.cli.serve.read_options import parse
from sterna.config import DoorConfig, FrontendConfig
from sterna.frontend.vllm_server.server import FrontendServer
from sterna.messages.actors import AddRequest, FrontendMember, InstanceMember, Membership
from sterna.messaging.mailbox import Mailbox
from sterna.types import FrontendId
from tests.frontend.calls import folders_called
from tests.frontend.scripted import ScriptedCluster, ready, within
from tests.models import small_model

pytestmark = pytest.mark.vllm

FIRST, SECOND = FrontendId(1), FrontendId(2)
CONFIG = FrontendConfig(
    scheduler_timeout_s=1.0,
    owner_timeout_s=0.05,
    shutdown_timeout_s=0.1,
    door=DoorConfig(resume_window_s=60.0),
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello!"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>'
WORDS = "From the Arctic to the Antarctic and back again, year after year"


class FrontEnd:
    """One front end, and what it knows of the cluster: a scheduler and instances of its own."""

    def __init__(self, frontend_id: FrontendId, port: int) -> None:
        self.mailbox = Mailbox("127.0.0.1")
        self.cluster = ScriptedCluster(self.mailbox.address)
        model = ["serve", str(small_model()), "--served-model-name", "small"]
        tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"]
        own = ["--port", str(port), "--frontends", "2", "--max-model-len", "2048"]
        args = parse([*model, *tools, *own])
        self.server = FrontendServer(frontend_id, args, CONFIG, self.mailbox, ready())
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        self._frontend_id = frontend_id
        self._version = 0

    def hears(self, *frontends: "FrontEnd") -> None:
        """Tell it that these live."""
        self._version += 1
        instance = self.cluster.i0
        membership = Membership(
            version=self._version,
            instances=(InstanceMember(instance.instance_id, instance.mailbox.address),),
            frontends=tuple(
                FrontendMember(each._frontend_id, each.mailbox.address) for each in frontends
            ),
            scheduler=self.cluster.scheduler.mailbox.address,
        )
        instance.send(membership)

    async def close(self) -> None:
        await self.http.aclose()
        await self.server.stop()
        await self.server.wait()
        self.cluster.close()
        self.mailbox.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", autouse=True)
def _one_by_one() -> Iterator[None]:
    """Outputs are not joined when they come fast, so that events can be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sterna.frontend.resumable.pacing.MAX_WAITING", 1_000)
        yield


@pytest.fixture(scope="module")
def ends(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[FrontEnd, FrontEnd]]:
    async def start() -> tuple[FrontEnd, FrontEnd]:
        both = FrontEnd(FIRST, free_port()), FrontEnd(SECOND, free_port())
        for each in both:
            each.hears(*both)
        # Neither lets clients in before the other one knows it.
        await asyncio.gather(*(each.server.start() for each in both))
        return both

    ends = loop.run_until_complete(start())
    yield ends

    async def stop() -> None:
        for each in ends:
            await each.close()

    loop.run_until_complete(within(stop()))


class Said:
    """What instances say of one HTTP request: the same at whichever front end it is asked for."""

    def __init__(self, tokens: Callable[[str], list[int]], num_logprobs: int | None) -> None:
        self._tokens = tokens
        self._num_logprobs = num_logprobs

    def answer(self, choice: str, text: str) -> list[int]:
        return self._tokens(f"{choice} {text}")

    def fields(self, token: int) -> dict[str, Any]:
        if self._num_logprobs is None:
            return {}
        size = self._num_logprobs
        likely = np.array([[token, *range(token % 7, token % 7 + size)]], dtype=np.int32)
        values = -np.arange(size + 1, dtype=np.float32)[None, :] - token % 5
        ranks = np.ones(1, dtype=np.int32)
        return {
            "new_logprobs": LogprobsLists(
                logprob_token_ids=likely, logprobs=values, sampled_token_ranks=ranks
            )
        }


@asynccontextmanager
async def stream(
    end: FrontEnd, path: str, body: dict[str, Any], request_id: str, last: int | None = None
) -> AsyncIterator[AsyncIterator[str]]:
    headers = {"X-Request-Id": request_id}
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    body = {"model": "small", "stream": True, **body}
    async with end.http.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    event: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            event.append(line)
        else:
            yield "\n".join(event)
            event = []


# The path, the body, how many engine requests it becomes, what each says, and in how many steps it
# says what it does before the death.
CASES: dict[str, tuple[str, dict[str, Any], int, str, int]] = {
    "chat": (CHAT, {"messages": MESSAGES}, 1, WORDS, 6),
    "two choices": (CHAT, {"messages": MESSAGES, "n": 2, "temperature": 1.0}, 2, WORDS, 6),
    "log probabilities": (
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3},
        1,
        WORDS,
        6,
    ),
    "a stop string": (
        CHAT,
        {"messages": MESSAGES, "n": 2, "stop": ["0 From the Antarctic", "1 From the Arctic to"]},
        2,
        WORDS,
        6,
    ),
    "a tool call": (CHAT, {"messages": MESSAGES, "tools": [WEATHER]}, 1, CALL, 18),
    "usage": (
        CHAT,
        {
            "messages": MESSAGES,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        1,
        WORDS,
        6,
    ),
    "text": (TEXT, {"prompt": "Terns", "echo": True}, 1, WORDS, 6),
    "text with log probabilities": (TEXT, {"prompt": "Terns", "logprobs": 2}, 1, WORDS, 6),
    "two prompts": (TEXT, {"prompt": ["Terns", "Gulls"]}, 2, WORDS, 6),
}


async def speak(
    end: FrontEnd, request_id: str, said: Said, num: int, text: str, num_steps: int
) -> None:
    """Have the instance say what it has to say to so many engine requests of the HTTP request, in
    so many steps of a token for each, behind what they come with."""
    at: dict[str, tuple[int, list[int]]] = {}
    for _ in range(num):
        message, _ = await end.cluster.i0.get(
            AddRequest, lambda each: f"-{request_id}-" in each.request_id
        )
        choice = re.match(r"\d+(?=_)", message.request_id) or re.search(
            r"\d+(?=-[0-9a-f]{8}$)", message.request_id
        )
        answer = said.answer(choice[0] if choice and num > 1 else "", text)
        num_told = len(message.output_token_ids)
        assert list(message.output_token_ids) == answer[:num_told]
        at[message.request_id] = num_told, answer
    for _ in range(num_steps):
        for engine_id, (place, answer) in at.items():
            if place < len(answer):
                token = answer[place]
                finish = FinishReason.STOP if place + 1 == len(answer) else None
                fields = said.fields(token)
                end.cluster.i0.send_tokens(engine_id, place, [token], finish, **fields)
                at[engine_id] = place + 1, answer


def normal(event: str, request_id: str) -> str:
    """An event without what is drawn anew for each answer."""
    event = re.sub(r"^(id: \d+)-\d+", r"\1", event.replace(request_id, "ID"))
    event = re.sub(r'"created":\d+', '"created":0', event)
    return re.sub(r"chatcmpl-tool-[0-9a-f]+", "TOOL", event)


Outcome = tuple[list[str], list[str]]
"""The events of an undisturbed stream, and of one that went on at another front end."""

NUM_KNOWN = (1, 4)
"""Events that a client has got before the death."""


@pytest.fixture(scope="module")
def outcomes(
    loop: asyncio.AbstractEventLoop, ends: tuple[FrontEnd, FrontEnd]
) -> dict[tuple[str, int], Outcome]:
    """One front end dies under many streams; the other one goes on with all of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model())
    first, second = ends

    def said(body: dict[str, Any]) -> Said:
        num_logprobs = body.get("top_logprobs", body.get("logprobs"))
        return Said(lambda text: tokenizer.encode(text, add_special_tokens=False), num_logprobs)

    async def whole(name: str, request_id: str) -> list[str]:
        path, body, num, text, _ = CASES[name]
        async with stream(first, path, body, request_id) as events:
            await speak(first, request_id, said(body), num, text, 1000)
            return [each async for each in events]

    async def beginning(name: str, request_id: str, num_known: int) -> list[str]:
        path, body, num, text, num_steps = CASES[name]
        known: list[str] = []
        async with stream(first, path, body, request_id) as events:
            await speak(first, request_id, said(body), num, text, num_steps)
            async for each in events:
                known.append(each)
                if len(known) == num_known:
                    break
        return known

    async def rest(name: str, request_id: str, num_known: int) -> list[str]:
        path, body, num, text, _ = CASES[name]
        async with stream(second, path, body, request_id, last=num_known) as events:
            await speak(second, request_id, said(body), num, text, 1000)
            return [each async for each in events]

    async def scenario() -> dict[tuple[str, int], Outcome]:
        cases = {
            (name, known): f"{n}x{known}" for n, name in enumerate(CASES) for known in NUM_KNOWN
        }
        found: dict[tuple[str, int], Outcome] = {}
        for (name, num_known), number in cases.items():
            undisturbed = await whole(name, f"whole{number}")
            known = await beginning(name, f"broken{number}", num_known)
            found[name, num_known] = (
                [normal(each, f"whole{number}") for each in undisturbed],
                known,
            )
        second.hears(second)
        for (name, num_known), number in cases.items():
            undisturbed, known = found[name, num_known]
            known += await rest(name, f"broken{number}", num_known)
            times = {time for each in known for time in re.findall(r'"created":\d+', each)}
            assert len(times) == 1
            found[name, num_known] = undisturbed, [normal(e, f"broken{number}") for e in known]
        return found

    return loop.run_until_complete(within(scenario()))


@pytest.mark.parametrize("num_known", NUM_KNOWN)
@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_elsewhere_with_the_events_of_an_undisturbed_one(
    outcomes: dict[tuple[str, int], Outcome], name: str, num_known: int
) -> None:
    undisturbed, broken = outcomes[name, num_known]
    assert undisturbed[-1].endswith("data: [DONE]")
    assert broken == undisturbed


NOT_REPLICATED: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100}, "message_stop"),
    "tokens": (
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 100}},
        "data: [DONE]",
    ),
}
"""The path, the body, and what the last event says."""


@pytest.mark.parametrize("name", NOT_REPLICATED)
def test_a_stream_of_which_there_is_no_replica_is_read_on_too(
    loop: asyncio.AbstractEventLoop, ends: tuple[FrontEnd, FrontEnd], name: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model())
    said = Said(lambda text: tokenizer.encode(text, add_special_tokens=False), None)
    path, body, end = NOT_REPLICATED[name]
    first, _ = ends

    async def scenario() -> None:
        known: list[str] = []
        async with stream(first, path, body, f"left-{name}") as events:
            await speak(first, f"left-{name}", said, 1, WORDS, 1000)
            async for each in events:
                known.append(each)
                break
        async with stream(first, path, body, f"left-{name}", last=1) as events:
            known += [each async for each in events]
        assert [each.split("\n")[0] for each in known] == [
            f"id: {number}" for number in range(1, len(known) + 1)
        ]
        assert len(known) > 1
        assert end in known[-1]
        async with stream(first, path, body, f"left-{name}", last=0) as events:
            assert known == [each async for each in events]

    loop.run_until_complete(within(scenario()))


def test_the_code_of_resumable_streams_is_on_the_way_of_their_tokens(
    loop: asyncio.AbstractEventLoop, ends: tuple[FrontEnd, FrontEnd]
) -> None:
    """So that it would be noticed without the option: `test_server.py`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model())
    said = Said(lambda text: tokenizer.encode(text, add_special_tokens=False), None)
    first, _ = ends

    async def scenario() -> None:
        with folders_called("sterna/frontend") as num_calls:
            async with stream(first, CHAT, {"messages": MESSAGES}, "called") as events:
                await speak(first, "called", said, 1, WORDS, 1000)
                num_events = len([each async for each in events])
        assert num_calls["resumable"] > num_events

    loop.run_until_complete(within(scenario()))
