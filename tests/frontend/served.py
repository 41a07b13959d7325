"""vLLM's own server, over HTTP, in front of scripted instances."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from bench.serving.ports import free_port
from sterna.config import DoorConfig, FrontendConfig
from sterna.frontend.vllm_server.server import FrontendServer
from sterna.messaging.mailbox import Mailbox
from tests.frontend.scripted import HANG_S, ME, ScriptedCluster, ready, within

MAX_QUEUED = 10
CONFIG = FrontendConfig(
    scheduler_timeout_s=1.0,
    owner_timeout_s=0.05,
    gap_timeout_s=HANG_S,
    shutdown_timeout_s=1.0,
    door=DoorConfig(max_queued_requests=MAX_QUEUED, max_body_bytes=100_000),
)
API_KEY = "secret"
MESSAGES = [{"role": "user", "content": "Hello!"}]


class Served:
    """A front end that answers HTTP, and the cluster behind it."""

    def __init__(
        self, server: FrontendServer, mailbox: Mailbox, cluster: ScriptedCluster, url: str
    ) -> None:
        self.server, self.mailbox, self.cluster = server, mailbox, cluster
        headers = {"Authorization": f"Bearer {API_KEY}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0)
        from transformers import AutoTokenizer

        from tests.models import small_model

        self._tokenizer = AutoTokenizer.from_pretrained(small_model())

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def post(self, path: str, **body: Any) -> "asyncio.Task[httpx.Response]":
        """Send a request; the answer can be awaited when the instances have spoken."""
        return asyncio.create_task(self.http.post(path, json=body))

    def chat(self, **body: Any) -> "asyncio.Task[httpx.Response]":
        return self.post("/v1/chat/completions", model="small", messages=MESSAGES, **body)

    @asynccontextmanager
    async def streamed_chat(self, **body: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield the events of a streamed answer, without the final [DONE]."""
        body = {"model": "small", "messages": MESSAGES, "stream": True, **body}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            yield events_of(answer)

    async def healthy(self, status: int) -> None:
        """Wait until `/health` answers so; each answer takes a turn of the server's loop."""
        while (await self.http.get("/health")).status_code != status:
            pass


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def options_of_vllm(port: int, *more: str) -> Namespace:
    from sterna.cli.serve.read_options import parse
    from tests.models import small_model

    model = str(small_model())
    options = ["--served-model-name", "small", "--port", str(port), "--api-key", API_KEY]
    return parse(["serve", model, *options, "--max-model-len", "2048", *more])


async def _serve(config: FrontendConfig, *options: str) -> Served:
    port = free_port()
    args = options_of_vllm(port, *options)
    mailbox = Mailbox("127.0.0.1")
    cluster = ScriptedCluster(mailbox.address)
    cluster.announce(cluster.i0, cluster.i1)
    server = FrontendServer(ME, args, config, mailbox, ready())
    await server.start()
    return Served(server, mailbox, cluster, f"http://127.0.0.1:{port}")


Scenario = Callable[[Served], Coroutine[Any, Any, None]]
"""What a test does with the server."""


@contextmanager
def one_server(
    config: FrontendConfig = CONFIG, *options: str
) -> Iterator[Callable[[Scenario], None]]:
    """Yield what plays scenarios, one after the other, each of which begins with two instances.

    Args:
        options: further ones of `sterna serve`.
    """
    loop = asyncio.new_event_loop()
    served = loop.run_until_complete(_serve(config, *options))

    async def played(scenario: Scenario) -> None:
        cluster = served.cluster
        cluster.announce(cluster.i0, cluster.i1)
        while getattr(served.server.membership, "version", 0) != cluster.version:
            # Each answer takes a turn of the server's loop.
            await served.http.get("/health")
        await scenario(served)

    def run(scenario: Scenario) -> None:
        loop.run_until_complete(within(played(scenario)))

    yield run

    async def stop() -> None:
        await served.http.aclose()
        await served.server.stop()
        await served.server.wait()
        served.cluster.close()
        served.mailbox.close()

    loop.run_until_complete(within(stop()))
    loop.close()
