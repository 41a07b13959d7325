"""A router between vLLM's engine-core client and a scripted cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from sterna.config import FrontendConfig
from sterna.frontend.vllm_server.router import Router
from sterna.messaging.mailbox import Mailbox
from tests.frontend.scripted import ME, ScriptedCluster, ready, within

CONFIG = FrontendConfig(
    scheduler_timeout_s=0.05,
    owner_retry_s=0.05,
    owner_timeout_s=0.05,
    gap_timeout_s=0.05,
)


class Client:
    """The sockets of vLLM's AsyncMPClient, without the rest of it."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._input.bind(addresses["input_address"])
        self._output = self._context.socket(zmq.PULL)
        self._output.bind(addresses["output_address"])
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    async def ready(self) -> EngineCoreReadyResponse:
        self._engine, payload = await self._input.recv_multipart()
        return msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)

    async def send(self, kind: EngineCoreRequestType, message: object) -> None:
        frames = [self._engine, kind.value, *self._encoder.encode(message)]
        await self._input.send_multipart(frames)

    async def add(self, request: EngineCoreRequest) -> None:
        await self.send(EngineCoreRequestType.ADD, request)

    async def call(self, method: str, *args: object) -> Any:
        await self.send(EngineCoreRequestType.UTILITY, (0, 1 << 63, method, args))
        outputs = await self.receive()
        assert outputs.utility_output.call_id == 1 << 63
        return outputs.utility_output

    async def receive(self) -> EngineCoreOutputs:
        return self._decoder.decode(await self._output.recv_multipart())

    async def receive_output(self) -> EngineCoreOutput:
        (output,) = (await self.receive()).outputs
        return output

    def close(self) -> None:
        self._context.destroy(linger=0)


class World:
    """A router between vLLM's client and a scripted cluster."""

    def __init__(self, client: Client, cluster: ScriptedCluster, router: Router) -> None:
        self.client, self.cluster, self.router = client, cluster, router


@asynccontextmanager
async def world(folder: Path, config: FrontendConfig = CONFIG) -> AsyncIterator[World]:
    mailbox = Mailbox("127.0.0.1")
    router = Router(ME, config, mailbox, ready(), folder)
    running = asyncio.create_task(router.run())
    client = Client(router.client_addresses)
    cluster = ScriptedCluster(mailbox.address)
    cluster.announce(cluster.i0, cluster.i1)
    try:
        await client.ready()
        await router.peers.served()
        yield World(client, cluster, router)
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.wait({running})
        client.close()
        cluster.close()
        router.close()
        mailbox.close()


def in_worlds_of(folder: Path) -> Callable[..., None]:
    """Returns what runs a test's coroutine in a world of its own."""

    def run(test: Callable[[World], Coroutine[Any, Any, None]], **changes: Any) -> None:
        async def in_world() -> None:
            async with world(folder, replace(CONFIG, **changes)) as each:
                await test(each)

        asyncio.run(within(in_world()))

    return run
