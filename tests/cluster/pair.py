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
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import ray
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from sterna.config import LlumletConfig, MigrationConfig, PolicyConfig, TransportConfig
from sterna.engine.interface import EngineReady
from sterna.engine.vllm.payload import cut_leading_tokens, decode_outputs, encode_request
from sterna.frontend.requests.token_streams import TokenStreams
from sterna.frontend.vllm_server.prompt_hashes import prompt_hashes
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    AdminReply,
    CopyPrefix,
    FrontendMember,
    InstanceMember,
    ListRequests,
    LoadReport,
    Membership,
    MigrateRequest,
    PrefixDone,
    RequestsMoved,
    SetDestination,
    TokenBatch,
    TokenSpan,
)
from sterna.messaging.mailbox import Mailbox
from sterna.migration.messages import Mode, Reason
from sterna.policy.presets import LLUMNIX
from sterna.runtime.actors.actor_classes import InstanceSpec
from sterna.types import FrontendId, InstanceId, InstanceLoad, RequestId
from tests.cluster.actors import ProbedInstance
from tests.cluster.requests import RequestBuilder

FRONTEND = FrontendId(7)
HANG_TIMEOUT_S = 300.0
"""No wait of a test takes so long unless something hangs, on a machine however busy."""


Hear = Callable[[Awaitable[Any]], Awaitable[Any]]


async def until(changed: asyncio.Condition, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with changed:
        await changed.wait_for(condition)


@dataclass
class Generated:
    """What one request has produced so far.

    Attributes:
        outputs: as the client gets them: in order, each token once.
        moves: where it was adopted, in order.
        reports: what `generate_moving` was told of each move.
        origins: which instance sent each token, by its index.
        num_repeated: tokens that instances sent a second time. Without a death there are none:
            at any moment at most one instance steps a request.
    """

    request_id: RequestId
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    moves: list[InstanceId] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    num_repeated: int = 0
    origins: dict[int, InstanceId] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    hear: Hear = field(kw_only=True)

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
    def ranked_tokens(self) -> list[tuple[list[int], int]]:
        """The tokens that log probabilities belong to, and the rank of the one that was sampled."""
        return [
            (row.tolist(), int(rank))
            for output in self.outputs
            if (found := output.new_logprobs) is not None
            for row, rank in zip(found.logprob_token_ids, found.sampled_token_ranks, strict=True)
        ]

    @property
    def prompt_logprobs(self) -> list[list[float]]:
        return [
            row.tolist()
            for output in self.outputs
            if output.new_prompt_logprobs_tensors is not None
            for row in output.new_prompt_logprobs_tensors.logprobs
        ]

    @property
    def finish_reason(self) -> str | None:
        reason = self.outputs[-1].finish_reason if self.outputs else None
        return None if reason is None else str(reason)

    @property
    def stop_reason(self) -> int | str | None:
        """The token or string at which it ended, if it is one that was asked for."""
        return self.outputs[-1].stop_reason if self.outputs else None

    def count(self, instance_id: InstanceId, span: TokenSpan) -> None:
        """Note who sent which tokens."""
        for index in range(span.first_index, span.first_index + span.num_tokens):
            self.num_repeated += index in self.origins
            self.origins[index] = instance_id

    async def until_tokens(self, count: int) -> None:
        """Wait until so many tokens are there, or the request has ended."""
        await self._until(lambda: len(self.token_ids) >= count or self.finish_reason is not None)

    async def until_end(self) -> "Generated":
        await self._until(lambda: self.finish_reason is not None)
        return self

    async def _until(self, condition: Any) -> None:
        await self.hear(until(self.changed, condition))


def assert_same(found: Generated, expected: Generated, *, may_round: bool = False) -> None:
    """The two requests said the same, and nobody said anything twice.

    Args:
        may_round: tokens were computed in other batches, or many at once, which may round
            otherwise than one at a time: log probabilities need not be equal to the bit, and those
            that are nearly equal may be in another order.
    """
    assert found.token_ids == expected.token_ids
    if may_round:
        assert found.logprobs == [pytest.approx(row, rel=1e-4) for row in expected.logprobs]
    else:
        assert found.logprobs == expected.logprobs
        assert found.ranked_tokens == expected.ranked_tokens
        assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.finish_reason == expected.finish_reason
    assert found.stop_reason == expected.stop_reason
    assert found.num_repeated == 0, "a token came twice"


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
        self.build = RequestBuilder(args)
        self._environment = environment
        self._transport = transport or TransportConfig()
        self._llumlet = LlumletConfig(
            policy=policy,
            migration=migration or MigrationConfig(),
            # `until_idle` looks at each report.
            heartbeat_interval_s=0.1,
        )
        self._num_instances = num_instances
        self._num_gpus = num_gpus
        self._numbers = itertools.count(1)
        self._version = 0
        self.actors: dict[InstanceId, Any] = {}
        self.addresses: dict[InstanceId, str] = {}
        self.loads: dict[InstanceId, InstanceLoad] = {}
        self.fresh: dict[InstanceId, dict[str, int]] = {}
        self.on_load: Callable[[InstanceLoad], None] | None = None
        self.is_closed = False
        self._generated: dict[RequestId, Generated] = {}
        self._replies: dict[int, asyncio.Future[AdminReply]] = {}
        self._prefixes: dict[RequestId, asyncio.Future[None]] = {}
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mailbox = Mailbox("127.0.0.1")
        self._streams = TokenStreams(gap_timeout_s=HANG_TIMEOUT_S)
        self._load_changed = asyncio.Condition()
        self._delivery = asyncio.create_task(self._mailbox.deliver(self._handle))
        ids = [InstanceId(f"i{number}") for number in range(self._num_instances)]
        await asyncio.gather(*(self.add_instance(instance_id) for instance_id in ids))

    async def add_instance(self, instance_id: InstanceId) -> None:
        actor = ProbedInstance.options(num_gpus=self._num_gpus).remote()
        spec = InstanceSpec(
            instance_id,
            packed_args=pickle.dumps(self._args),
            options=(),
            llumlet=self._llumlet,
            transport=self._transport,
            host="127.0.0.1",
            environment=self._environment,
            log_level="INFO",
        )
        address, self.facts = await actor.start.remote(spec)
        self.fresh[instance_id] = await actor.inventory.remote()
        self.actors[instance_id] = actor
        self._watches.append(asyncio.create_task(self._watch(instance_id, actor)))
        self.addresses[instance_id] = address
        self.announce()

    async def _watch(self, instance_id: InstanceId, actor: Any) -> None:
        """Have every wait fail when an engine does."""
        try:
            reason = await _outcome(actor.run.remote())
        except ray.exceptions.RayError as error:
            reason = str(error)
        if self.actors.get(instance_id) is actor and not self._failure.done():
            self._failure.set_exception(AssertionError(f"{instance_id} failed: {reason}"))

    async def hear(self, awaitable: Awaitable[Any]) -> Any:
        """Return the awaitable's outcome, unless it hangs or an engine fails."""
        task: asyncio.Future[Any] = asyncio.ensure_future(awaitable)
        done, _ = await asyncio.wait(
            {task, self._failure},
            timeout=HANG_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if task in done:
            return task.result()
        task.cancel()
        if self._failure in done:
            self._failure.result()
        raise TimeoutError

    async def close(self) -> None:
        self.is_closed = True
        actors, self.actors = self.actors, {}
        for actor in actors.values():
            await asyncio.wait_for(_outcome(actor.close.remote()), HANG_TIMEOUT_S)
            ray.kill(actor)
        for watch in self._watches:
            watch.cancel()
        self._delivery.cancel()
        self._mailbox.close()

    def announce(self) -> None:
        """Tell the instances who is there; the test is their scheduler and front end."""
        self._version += 1
        instances = tuple(InstanceMember(i, address) for i, address in self.addresses.items())
        frontends = (FrontendMember(FRONTEND, self._mailbox.address),)
        membership = Membership(self._version, instances, frontends, self._mailbox.address)
        for address in self.addresses.values():
            self._mailbox.send(address, membership)

    @asynccontextmanager
    async def held(
        self, instance_id: str, point: str, num_migrations: int = 1
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Stop migrations when they come to a point (`actors.point_of`) on the instance, and let
        them go on at the end of the block. Yields a function that waits until they are there."""
        actor = self.actors[InstanceId(instance_id)]
        await actor.hold.remote(point)

        async def until_held() -> None:
            await self.hear(_outcome(actor.until_held.remote(num_migrations)))

        yield until_held
        if InstanceId(instance_id) in self.actors:
            await actor.let_go.remote()

    async def process_id(self, instance_id: str) -> int:
        """Return the instance's process."""
        process = await self.actors[InstanceId(instance_id)].process.remote()
        return int(process.process_id)

    async def freeze(self, instance_id: str) -> int:
        """SIGSTOP the instance's process, and return it."""
        process_id = await self.process_id(instance_id)
        os.kill(process_id, signal.SIGSTOP)
        return process_id

    async def kill(self, instance_id: str, process_id: int | None = None) -> None:
        """SIGKILL the instance's process (given, if it cannot be asked), and tell nobody."""
        if process_id is None:
            process_id = await self.process_id(instance_id)
        del self.actors[InstanceId(instance_id)]
        os.kill(process_id, signal.SIGKILL)

    async def remove(self, instance_id: str) -> None:
        """Close the instance and confirm its end to the others."""
        actor = self.actors.pop(InstanceId(instance_id))
        await self.hear(_outcome(actor.close.remote()))
        ray.kill(actor)
        self.bury(instance_id)

    def bury(self, instance_id: str) -> None:
        """Confirm the instance's death to the others."""
        del self.addresses[InstanceId(instance_id)]
        self.loads.pop(InstanceId(instance_id), None)
        self.announce()

    # ------------------------------------------------------------------------------ requests

    def submit(
        self,
        request: EngineCoreRequest,
        instance_id: str,
        dispatch_number: int | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> Generated:
        """Send the request to the instance; with the tokens that its client has, where it was on
        one that has died."""
        if dispatch_number is None:
            dispatch_number = next(self._numbers)
        request.client_index = FRONTEND
        request_id = RequestId(request.request_id)
        self._streams.open(request_id, len(output_token_ids))
        generated = self._generated[request_id] = Generated(request_id, hear=self.hear)
        self._mailbox.send(
            self.addresses[InstanceId(instance_id)],
            AddRequest(FRONTEND, request_id, dispatch_number, tuple(output_token_ids)),
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
        reply = await self.hear(self.begin_move(request_id, source, to, mode))
        report: dict[str, Any] = msgspec.json.decode(reply.body)
        return report

    async def copy_prefix(
        self, request: EngineCoreRequest, source: str, to: str, *, first_token: int = 0
    ) -> None:
        """Play the scheduler: have what the source has of the prompt copied, and wait until the
        request may come."""
        ready = msgspec.msgpack.decode(self.facts.ready, type=EngineReady)
        assert ready.hashing is not None
        request_id = RequestId(request.request_id)
        hashes = prompt_hashes(ready.hashing)(request)
        done = self._prefixes[request_id] = asyncio.get_running_loop().create_future()
        order = CopyPrefix(request_id, InstanceId(to), hashes, first_token)
        self._mailbox.send(self.addresses[InstanceId(source)], order)
        await self.hear(done)

    async def cached_tokens(self, request: EngineCoreRequest, instance_id: str) -> int:
        """Return how many of the request's tokens the instance would not have to compute."""
        actor = self.actors[InstanceId(instance_id)]
        return int(await actor.cached_tokens.remote(encode_request(request)))

    async def generate(self, request: EngineCoreRequest, instance_id: str = "i0") -> Generated:
        """Run the request on one instance."""
        return await self.submit(request, instance_id).until_end()

    async def generate_moving(
        self,
        request: EngineCoreRequest,
        cuts: Sequence[int],
        mode: Mode = Mode.LIVE,
        between: tuple[str, str] = ("i0", "i1"),
        *,
        is_exact: bool = False,
    ) -> Generated:
        """Run the request, starting on the first of two instances and moving it to the other
        one when so many tokens are there, again and again.

        Args:
            is_exact: let no step pass between a cut and its move: without, decoding goes on
                while the move is ordered, and the request must be long enough to be still there.
        """
        here, there = between
        request_id = request.request_id
        if is_exact:
            for number, cut in enumerate(cuts):
                await self.pause_at(request_id, between[number % 2], cut)
                if number == 1:
                    break
        generated = self.submit(request, here)
        for number, cut in enumerate(cuts):
            await generated.until_tokens(cut)
            report = await self.move(request_id, here, there, mode)
            while report.get("reason") == Reason.ALREADY_MIGRATING.value:
                # It has come, and the source's word that it knows so is still on its way.
                await self.until_next_report(here)
                report = await self.move(request_id, here, there, mode)
            assert "stages" in report, report
            generated.reports.append(report)
            if is_exact:
                # It may come back here: next time later.
                later = cuts[number + 2] if number + 2 < len(cuts) else sys.maxsize
                await self.pause_at(request_id, here, later)
            here, there = there, here
        return await generated.until_end()

    async def pause_at(self, request_id: str, instance_id: str, num_tokens: int) -> None:
        """Have the instance make no step once the request is there with so many tokens."""
        await self.actors[InstanceId(instance_id)].pause_at.remote(request_id, num_tokens)

    async def unpause(self, request_id: str, instance_id: str) -> None:
        """Have the instance step the request again."""
        await self.actors[InstanceId(instance_id)].unpause.remote(request_id)

    def set_destination(self, source: str, to: str | None) -> None:
        """Play the scheduler: have the source migrate to `to` until told otherwise."""
        destination = None if to is None else InstanceId(to)
        self._mailbox.send(self.addresses[InstanceId(source)], SetDestination(destination))

    async def requests_on(self, instance_id: str) -> dict[RequestId, dict[str, Any]]:
        """Return what the instance says of its requests."""
        query_id = next(self._numbers)
        reply = self._replies[query_id] = asyncio.get_running_loop().create_future()
        question = ListRequests(self._mailbox.address, query_id)
        self._mailbox.send(self.addresses[InstanceId(instance_id)], question)
        answer = await self.hear(reply)
        return {each["id"]: each for each in msgspec.json.decode(answer.body)}

    async def until_reported(
        self, instance_id: str, condition: Callable[[InstanceLoad], bool]
    ) -> None:
        """Wait until the instance reports a load that meets the condition."""

        def is_met() -> bool:
            load = self.loads.get(InstanceId(instance_id))
            return load is not None and condition(load)

        await self.hear(until(self._load_changed, is_met))

    async def settle(self) -> None:
        """Undo what a test has arranged, end the requests that it left, and wait until all is
        idle; for the end of a test, also of one that failed half-way."""
        for actor in self.actors.values():
            for undo in (actor.let_go, actor.unpause, actor.repair):
                await self.hear(_outcome(undo.remote()))
        for request_id, generated in self._generated.items():
            if generated.finish_reason is None:
                for instance_id in self.actors:
                    self.abort(request_id, instance_id)
        self.on_load = None
        for instance_id in self.addresses:
            self.set_destination(instance_id, None)
        self._generated.clear()
        self._replies.clear()
        await self.until_idle()

    async def until_idle(self, *instance_ids: str) -> None:
        """Wait until the instances (all, unless named) hold what they held when they were fresh:
        every block free, no request, reservation or migration."""
        for instance_id in [InstanceId(i) for i in instance_ids] or list(self.addresses):
            leftovers: dict[str, tuple[int, int]] = {}
            try:
                async with asyncio.timeout(HANG_TIMEOUT_S):
                    while leftovers := await self._leftovers(instance_id):
                        await self.until_next_report(instance_id)
            except TimeoutError:
                pytest.fail(f"{instance_id} holds (found, fresh): {leftovers}")

    async def _leftovers(self, instance_id: InstanceId) -> dict[str, tuple[int, int]]:
        found = await self.hear(_outcome(self.actors[instance_id].inventory.remote()))
        fresh = self.fresh[instance_id]
        return {name: (found[name], fresh[name]) for name in fresh if found[name] != fresh[name]}

    async def until_next_report(self, instance_id: str) -> None:
        """Wait until the instance has reported once more."""
        load = self.loads.get(InstanceId(instance_id))
        last = 0 if load is None else load.sequence
        await self.until_reported(instance_id, lambda load: load.sequence > last)

    # ------------------------------------------------------------------------------ messages

    def _handle(self, message: Any, frames: list[bytes]) -> None:
        match message:
            case TokenBatch(instance_id, spans):
                for span in spans:
                    if span.request_id in self._generated:
                        self._generated[span.request_id].count(instance_id, span)
                outcome = self._streams.on_batch(instance_id, spans, frames, 0.0)
                for delivery in outcome.deliveries:
                    generated = self._generated.get(delivery.request_id)
                    if generated is None:
                        continue
                    payload = cut_leading_tokens(delivery.payload, delivery.num_repeated)
                    (output,) = decode_outputs(payload).outputs
                    self._note(generated, output)
            case RequestsMoved(instance_id, request_ids):
                self._streams.on_moved(message)
                for request_id in request_ids:
                    if request_id in self._generated:
                        self._generated[request_id].moves.append(instance_id)
            case AdminReply(query_id):
                reply = self._replies.pop(query_id, None)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case PrefixDone(request_id):
                done = self._prefixes.pop(request_id, None)
                if done is not None:
                    done.set_result(None)
            case LoadReport(load):
                self.loads[load.instance_id] = load
                self._notify(self._load_changed)
                if self.on_load is not None:
                    self.on_load(load)

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
