"""Actors that do what a test says, at the other end of a front end's real mailbox."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)

from sterna.engine.interface import EngineReady
from sterna.engine.kv_memory import KvGroup, KvMemory
from sterna.engine.vllm.payload import (
    decode_request,
    decode_utility_call,
    encode_outputs,
    encode_utility_result,
)
from sterna.messages.actors import (
    AddRequest,
    AdminReply,
    CallUtility,
    Dispatched,
    DispatchRequest,
    FrontendMember,
    InstanceMember,
    ListInstances,
    ListRequests,
    Membership,
    MigrateRequest,
    OwnerQuery,
    OwnerReply,
    RequestsMoved,
    TokenBatch,
    TokenSpan,
    UtilityResult,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox
from sterna.types import FrontendId, InstanceId, RequestId

ME = FrontendId(7)
HANG_S = 60.0
"""No wait of a test takes so long unless something hangs."""

Message = TypeVar("Message")


def ready(block_size: int = 32, groups: tuple[KvGroup, ...] | None = None) -> bytes:
    """An instance's encoded `EngineReady`."""
    response = EngineCoreReadyResponse(
        max_model_len=2048,
        num_gpu_blocks=100,
        block_size=block_size,
        dp_stats_address=None,
        dtype="bfloat16",
        vllm_version="0.32.0",
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        instance_id="scripted",
        supports_lora=False,
        max_loras=0,
    )
    memory = KvMemory(block_size, groups or (KvGroup(block_size),))
    return EngineReady(msgspec.msgpack.encode(response), memory).encode()


class Actor:
    """Keeps every message that it gets until the test asks for it."""

    def __init__(self, frontend_address: str) -> None:
        self.mailbox = Mailbox("127.0.0.1")
        self._frontend_address = frontend_address
        self._messages: list[tuple[WireMessage, list[bytes]]] = []
        self._arrived = asyncio.Condition()
        self._delivery = asyncio.create_task(self._receive())

    def send(self, message: WireMessage, frames: Iterable[bytes] = ()) -> None:
        self.mailbox.send(self._frontend_address, message, list(frames))

    async def get(
        self, kind: type[Message], matches: Callable[[Message], bool] = lambda _: True
    ) -> tuple[Message, list[bytes]]:
        """Return the first message of that kind that matches, once it is there, and take it."""
        async with asyncio.timeout(HANG_S), self._arrived:
            while True:
                for number, (message, frames) in enumerate(self._messages):
                    if isinstance(message, kind) and matches(message):
                        del self._messages[number]
                        return message, frames
                await self._arrived.wait()

    def close(self) -> None:
        self._delivery.cancel()
        self.mailbox.close()

    async def _receive(self) -> None:
        while True:
            message, frames = await self.mailbox.receive()
            if not self._answer(message, frames):
                async with self._arrived:
                    self._messages.append((message, frames))
                    self._arrived.notify_all()

    def _answer(self, message: WireMessage, frames: list[bytes]) -> bool:
        return False


class ScriptedInstance(Actor):
    """Steps nothing by itself; answers what every instance answers.

    Attributes:
        claims: the requests that it has when it is asked who has them.
        arriving: those that it may come to have.
        utility_results: what its engine's methods return; an Exception makes them fail.
        described: its answer to ListRequests.
        refusal: why it does not migrate; None: it does.
    """

    def __init__(self, instance_id: str, frontend_address: str) -> None:
        super().__init__(frontend_address)
        self.instance_id = InstanceId(instance_id)
        self.claims: set[RequestId] = set()
        self.arriving: set[RequestId] = set()
        self.utility_results: dict[str, object] = {
            "get_supported_tasks": ("generate",),
            "reset_mm_cache": None,
        }
        self.described: list[dict[str, object]] = []
        self.refusal: str | None = None

    async def get_request(self) -> EngineCoreRequest:
        """Return the next request that was sent here."""
        _, (payload,) = await self.get(AddRequest)
        return decode_request(payload)

    def send_tokens(
        self,
        request_id: str,
        first_index: int,
        token_ids: Iterable[int],
        finish: FinishReason | None = None,
        **fields: Any,
    ) -> None:
        """Send one output, as one step produces it."""
        ids = list(token_ids)
        output = EngineCoreOutput(request_id, ids, finish_reason=finish, **fields)
        is_last, has_events = finish is not None, bool(output.events)
        span = TokenSpan(RequestId(request_id), first_index, len(ids), is_last, has_events)
        payload = encode_outputs(EngineCoreOutputs(outputs=[output]))
        self.send(TokenBatch(self.instance_id, (span,)), [payload])

    def send_moved(self, request_id: str, first_index: int) -> None:
        self.send(RequestsMoved(self.instance_id, (RequestId(request_id),), (first_index,), 0))

    def _answer(self, message: WireMessage, frames: list[bytes]) -> bool:
        match message:
            case CallUtility(_, call_id, method) if method in self.utility_results:
                call = decode_utility_call(frames[0])
                assert call.method == method
                result = self.utility_results[method]
                failure = str(result) if isinstance(result, Exception) else None
                payload = encode_utility_result(call_id, None if failure else result, failure)
                self.send(UtilityResult(self.instance_id, call_id), [payload])
            case OwnerQuery(_, query_id, request_ids):
                here = tuple(each for each in request_ids if each in self.claims)
                arriving = tuple(each for each in request_ids if each in self.arriving)
                self.send(OwnerReply(self.instance_id, query_id, here, arriving))
                return False
            case ListRequests(_, query_id):
                self.send(AdminReply(query_id, msgspec.json.encode(self.described)))
            case MigrateRequest(_, query_id, request_id, destination, mode):
                self.send(self._moved(query_id, request_id, destination, mode.value))
            case _:
                return False
        return True

    def _moved(
        self, query_id: int, request_id: RequestId, destination: InstanceId, mode: str
    ) -> AdminReply:
        if self.refusal is not None:
            body: dict[str, object] = {"request": request_id, "reason": self.refusal}
            return AdminReply(query_id, msgspec.json.encode(body), self.refusal)
        body = {"request": request_id, "from": self.instance_id, "to": destination, "mode": mode}
        return AdminReply(query_id, msgspec.json.encode(body))


class ScriptedScheduler(Actor):
    """Dispatches to `target`, or keeps silent when that is None."""

    def __init__(self, frontend_address: str) -> None:
        super().__init__(frontend_address)
        self.target: InstanceId | None = None
        self.asked: list[DispatchRequest] = []
        self.described: list[dict[str, object]] = []
        self.held: list[dict[str, object]] = []

    def _answer(self, message: WireMessage, frames: list[bytes]) -> bool:
        match message:
            case DispatchRequest(_, request_id):
                self.asked.append(message)
                if self.target is not None:
                    self.send(Dispatched(request_id, self.target, len(self.asked)))
            case ListInstances(_, query_id):
                self.send(AdminReply(query_id, msgspec.json.encode(self.described)))
            case ListRequests(_, query_id):
                self.send(AdminReply(query_id, msgspec.json.encode(self.held)))
            case _:
                return False
        return True


class ScriptedCluster:
    """Two instances, a scheduler that dispatches to the first, and the supervisor's news."""

    def __init__(self, frontend_address: str) -> None:
        self.i0 = ScriptedInstance("i0", frontend_address)
        self.i1 = ScriptedInstance("i1", frontend_address)
        self.scheduler = ScriptedScheduler(frontend_address)
        self.scheduler.target = self.i0.instance_id
        self.version = 0

    def announce(
        self,
        *instances: ScriptedInstance,
        frontends: Iterable[FrontendMember] = (),
        has_scheduler: bool = True,
    ) -> None:
        """Tell the front end that these live, and nobody else."""
        self.version += 1
        members = tuple(
            InstanceMember(each.instance_id, each.mailbox.address) for each in instances
        )
        scheduler = self.scheduler.mailbox.address if has_scheduler else None
        self.i0.send(Membership(self.version, members, tuple(frontends), scheduler))

    def close(self) -> None:
        for actor in (self.i0, self.i1, self.scheduler):
            actor.close()


async def within(coroutine: Coroutine[Any, Any, Message]) -> Message:
    async with asyncio.timeout(HANG_S):
        return await coroutine
