"""A small cluster for tests: real instances, and a supervisor, scheduler and front end that do
just what the test says.

The instances are the production actors with real vLLM engines; the test process plays the other
parts over the same mailboxes, so that it decides when a request moves, and sees every message.
"""

import asyncio
import itertools
import os
import pickle
import signal
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from sterna.config import LlumletConfig, MigrationConfig, PolicyConfig, TransportConfig
from sterna.engine.vllm.payload import decode_outputs, encode_request
from sterna.frontend.streams import Streams
from sterna.mailbox import Mailbox
from sterna.messages import (
    AbortRequests,
    AddRequest,
    AdminReply,
    Frontend,
    Instance,
    LoadReport,
    Membership,
    MigrateRequest,
    RequestsMoved,
    SetDestination,
    TokenBatch,
)
from sterna.migration.messages import Mode
from sterna.policy.presets import LLUMNIX
from sterna.runtime.actors import InstanceActor
from sterna.types import FrontendId, InstanceId, InstanceLoad, RequestId

FRONTEND = FrontendId(7)
HANG_TIMEOUT_S = 120.0
"""No wait of a test takes so long unless something hangs."""


@dataclass
class Generated:
    """What one request has produced so far."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    moves: list[InstanceId] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def logprobs(self) -> list[list[float]]:
        return [
            row.tolist()
            for output in self.outputs
            if output.new_logprobs is not None
            for row in output.new_logprobs.logprobs
        ]

    @property
    def finish_reason(self) -> str | None:
        reason = self.outputs[-1].finish_reason if self.outputs else None
        return None if reason is None else str(reason)

    async def until_tokens(self, count: int) -> None:
        """Wait until so many tokens are there, or the request has ended."""
        await self._until(lambda: len(self.token_ids) >= count or self.finish_reason is not None)

    async def until_end(self) -> "Generated":
        await self._until(lambda: self.finish_reason is not None)
        return self

    async def _until(self, condition: Any) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), HANG_TIMEOUT_S)


class InstancePair:
    """Some real instances under the test's control; two unless said otherwise."""

    def __init__(
        self,
        args: Namespace,
        environment: dict[str, str],
        *,
        transport: TransportConfig | None = None,
        policy: PolicyConfig = LLUMNIX,
        migration: MigrationConfig | None = None,
        num_instances: int = 2,
        num_gpus: int = 0,
    ) -> None:
        self._args = args
        self._environment = environment
        self._transport = transport or TransportConfig()
        self._llumlet = LlumletConfig(policy=policy, migration=migration or MigrationConfig())
        self._num_instances = num_instances
        self._num_gpus = num_gpus
        self._numbers = itertools.count(1)
        self._version = 0
        self.actors: dict[InstanceId, Any] = {}
        self.addresses: dict[InstanceId, str] = {}
        self.loads: dict[InstanceId, InstanceLoad] = {}
        self.is_closed = False
        self._generated: dict[RequestId, Generated] = {}
        self._replies: dict[int, asyncio.Future[AdminReply]] = {}

    async def start(self) -> None:
        self._mailbox = Mailbox("127.0.0.1")
        self._streams = Streams(gap_timeout_s=HANG_TIMEOUT_S)
        self._load_changed = asyncio.Condition()
        self._delivery = asyncio.create_task(self._mailbox.deliver(self._handle))
        ids = [InstanceId(f"i{number}") for number in range(self._num_instances)]
        await asyncio.gather(*(self.add_instance(instance_id) for instance_id in ids))

    async def add_instance(self, instance_id: InstanceId) -> None:
        actor = InstanceActor.options(num_gpus=self._num_gpus).remote()
        address, self.facts = await actor.start.remote(
            instance_id,
            pickle.dumps(self._args),
            self._llumlet,
            self._transport,
            "127.0.0.1",
            self._environment,
            "INFO",
        )
        self.actors[instance_id] = actor
        self.addresses[instance_id] = address
        self.announce()

    async def close(self) -> None:
        self.is_closed = True
        for actor in self.actors.values():
            await asyncio.wait_for(_outcome(actor.close.remote()), HANG_TIMEOUT_S)
            ray.kill(actor)
        self._delivery.cancel()
        self._mailbox.close()

    def announce(self) -> None:
        """Tell the instances who is there; the test is their scheduler and front end."""
        self._version += 1
        instances = tuple(Instance(i, address) for i, address in self.addresses.items())
        frontends = (Frontend(FRONTEND, self._mailbox.address),)
        membership = Membership(self._version, instances, frontends, self._mailbox.address)
        for address in self.addresses.values():
            self._mailbox.send(address, membership)

    async def kill(self, instance_id: InstanceId) -> None:
        """SIGKILL the instance's process, and tell nobody."""
        os.kill(await self.actors[instance_id].process_id.remote(), signal.SIGKILL)
        del self.actors[instance_id]

    def bury(self, instance_id: InstanceId) -> None:
        """Confirm the instance's death to the others."""
        del self.addresses[instance_id]
        self.loads.pop(instance_id, None)
        self.announce()

    # ------------------------------------------------------------------------------ requests

    def submit(self, request: EngineCoreRequest, instance_id: str) -> Generated:
        """Send the request to the instance."""
        request.client_index = FRONTEND
        request_id = RequestId(request.request_id)
        self._streams.open(request_id)
        generated = self._generated[request_id] = Generated()
        self._mailbox.send(
            self.addresses[InstanceId(instance_id)],
            AddRequest(FRONTEND, request_id, next(self._numbers)),
            [encode_request(request)],
        )
        return generated

    def abort(self, request_id: str, instance_id: str) -> None:
        """Tell the instance that the request's client has gone."""
        message = AbortRequests((RequestId(request_id),))
        self._mailbox.send(self.addresses[InstanceId(instance_id)], message)

    def begin_move(
        self, request_id: str, source: str, to: str, mode: Mode = Mode.LIVE
    ) -> "asyncio.Future[AdminReply]":
        """Order a migration; the future is its outcome."""
        query_id = next(self._numbers)
        reply = self._replies[query_id] = asyncio.get_running_loop().create_future()
        order = MigrateRequest(
            self._mailbox.address, query_id, RequestId(request_id), InstanceId(to), mode
        )
        self._mailbox.send(self.addresses[InstanceId(source)], order)
        return reply

    async def move(
        self, request_id: str, source: str, to: str, mode: Mode = Mode.LIVE
    ) -> dict[str, Any]:
        """Migrate the request and return the source's report; the reason is in `reason` when it
        did not go."""
        reply = await asyncio.wait_for(
            self.begin_move(request_id, source, to, mode), HANG_TIMEOUT_S
        )
        report: dict[str, Any] = msgspec.json.decode(reply.body)
        return report

    def set_destination(self, source: str, to: str | None) -> None:
        """Play the scheduler: have the source migrate to `to` until told otherwise."""
        destination = None if to is None else InstanceId(to)
        self._mailbox.send(self.addresses[InstanceId(source)], SetDestination(destination))

    async def until_idle(self, *instance_ids: str) -> None:
        """Wait until the instances (all, unless named) hold nothing: no request, block,
        reservation or migration."""
        wanted = [InstanceId(i) for i in instance_ids] or list(self.addresses)

        def is_idle() -> bool:
            loads = [self.loads.get(instance_id) for instance_id in wanted]
            return all(load is not None and _is_idle(load) for load in loads)

        async with self._load_changed:
            await asyncio.wait_for(self._load_changed.wait_for(is_idle), HANG_TIMEOUT_S)

    # ------------------------------------------------------------------------------ messages

    def _handle(self, message: Any, frames: list[bytes]) -> None:
        match message:
            case TokenBatch(_, spans):
                outcome = self._streams.on_batch(spans, frames, 0.0)
                for delivery in outcome.deliveries:
                    assert delivery.num_repeated == 0, "a token came twice"
                    (output,) = decode_outputs(delivery.payload).outputs
                    self._note(self._generated[delivery.request_id], output)
            case RequestsMoved(instance_id, request_ids):
                for request_id in request_ids:
                    self._generated[request_id].moves.append(instance_id)
            case AdminReply(query_id):
                self._replies.pop(query_id).set_result(message)
            case LoadReport(load):
                self.loads[load.instance_id] = load
                self._notify(self._load_changed)

    def _note(self, generated: Generated, output: EngineCoreOutput) -> None:
        generated.outputs.append(output)
        self._notify(generated.changed)

    @staticmethod
    def _notify(condition: asyncio.Condition) -> None:
        async def notify() -> None:
            async with condition:
                condition.notify_all()

        task = asyncio.create_task(notify())
        _notifications.add(task)
        task.add_done_callback(_notifications.discard)


async def _outcome(reference: Any) -> Any:
    return await reference


_notifications: set[asyncio.Task[None]] = set()


def _is_idle(load: InstanceLoad) -> bool:
    return not (
        load.used_tokens
        or load.num_running
        or load.num_queuing
        or load.num_migrating_in
        or load.num_migrating_out
    )
