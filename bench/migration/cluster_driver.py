"""Real instances for benchmarks: this process orders moves, and records the time of each token.

The instances are the production actors with real engines; this process is their supervisor,
scheduler and front end. Tokens are timed where a front end receives them, by one clock.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import ray
import torch
from ray.exceptions import RayTaskError
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.input_processor import InputProcessor

from bench.migration.samples import Arrival
from bench.migration.streams import HANG_TIMEOUT_S, Stream
from bench.migration.timed_instance import TimedInstance
from sterna.config import LlumletConfig, PolicyConfig, TransportConfig
from sterna.engine.interface import EngineFacts
from sterna.engine.payload_parts import renamed_request
from sterna.engine.vllm.hosted_core import engine_config
from sterna.engine.vllm.payload import encode_request
from sterna.frontend.requests.attempts import ATTEMPT_MARK
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    AdminReply,
    FrontendMember,
    InstanceMember,
    LoadReport,
    Membership,
    MigrateRequest,
    RequestsMoved,
    TokenBatch,
)
from sterna.messaging.mailbox import Mailbox
from sterna.migration.messages import Mode
from sterna.policy.presets import LLUMNIX
from sterna.runtime.actors.actor_classes import InstanceSpec, SchedulerActor
from sterna.runtime.processes.reaper import Reaper
from sterna.runtime.supervisor.ray_errors import origin_of
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.types import FrontendId, InstanceId, InstanceLoad, RequestId

HOST = "127.0.0.1"
FRONTEND = FrontendId(0)


class Driver:
    """Instances under the benchmark's control, called i0, i1, ...

    Args:
        actor_class: of the instances.

    Attributes:
        facts: of each instance's engine.
        vllm_config: of all engines.
    """

    def __init__(
        self,
        args: Namespace,
        environment: dict[str, str],
        transport: TransportConfig,
        num_instances: int = 2,
        actor_class: Any = TimedInstance,
    ) -> None:
        self._args = args
        self._environment = environment
        self._transport = transport
        self._llumlet = LlumletConfig(policy=LLUMNIX)
        self._num_instances = num_instances
        self._actor_class = actor_class
        self.facts: dict[str, EngineFacts] = {}
        self.vllm_config: Any = engine_config(args)
        self._processor: Any = InputProcessor(self.vllm_config)
        self._numbers = itertools.count(1)
        self._actors: dict[InstanceId, Any] = {}
        self._addresses: dict[InstanceId, str] = {}
        self._schedulers: list[Any] = []
        self._scheduler: str | None = None
        self._version = 0
        self._streams: dict[RequestId, Stream] = {}
        self._replies: dict[int, asyncio.Future[AdminReply]] = {}
        self._loads: dict[InstanceId, InstanceLoad] = {}
        self._loads_changed = asyncio.Event()

    async def start(self) -> None:
        """Start the instances.

        Raises:
            InstanceStartError: an instance could not start.
        """
        self._mailbox = Mailbox(HOST)
        self._delivery = asyncio.create_task(self._mailbox.deliver(self._handle))
        ids = [InstanceId(f"i{number}") for number in range(self._num_instances)]
        await asyncio.gather(*(self._start_instance(instance_id) for instance_id in ids))
        self._announce()

    async def _start_instance(self, instance_id: InstanceId) -> None:
        # Instances share the available devices.
        num_gpus = min(1.0, torch.cuda.device_count() / self._num_instances)
        actor = self._actor_class.options(num_gpus=num_gpus).remote()
        spec = InstanceSpec(
            instance_id,
            packed_args=pickle.dumps(self._args),
            options=(),
            llumlet=self._llumlet,
            transport=self._transport,
            host=HOST,
            environment=self._environment,
            log_level="WARNING",
        )
        self._actors[instance_id] = actor
        try:
            started = await actor.start.remote(spec)
        except RayTaskError as error:
            # Ray's own text is the actor's traceback.
            raise origin_of(error) from None
        self._addresses[instance_id], self.facts[instance_id] = started

    async def call(self, instance: str, method: str, *args: Any) -> Any:
        """Call a method of the instance's actor."""
        return await getattr(self._actors[InstanceId(instance)], method).remote(*args)

    async def kill(self, instance: str) -> None:
        """SIGKILL the instance's process, and confirm its death to the others."""
        process: ProcessIdentity = await self.call(instance, "process")
        os.kill(process.process_id, signal.SIGKILL)
        instance_id = InstanceId(instance)
        del self._actors[instance_id], self._addresses[instance_id]
        self._loads.pop(instance_id, None)
        # What it sent before may still arrive.
        self._streams = {
            request_id: stream
            for request_id, stream in self._streams.items()
            if stream.instance != instance
        }
        self._announce()

    async def close(self) -> None:
        """Close the instances, and end them."""
        for actor in self._actors.values():
            async with asyncio.timeout(HANG_TIMEOUT_S):
                await actor.close.remote()
        self.end()

    def end(self) -> None:
        """End the instances at once, whatever they do."""
        for actor in (*self._actors.values(), *self._schedulers):
            ray.kill(actor)
        self._delivery.cancel()
        self._mailbox.close()

    async def start_scheduler(self, policy: PolicyConfig) -> str:
        """Start a global scheduler without reports of instances; returns its address."""
        actor = SchedulerActor.remote()
        address: str = await actor.start.remote(policy, HOST, "WARNING", None)
        actor.run.remote()
        self._schedulers.append(actor)
        return address

    def use_scheduler(self, address: str | None) -> None:
        """Give the instances this scheduler; None: this process, which orders nothing."""
        last, self._scheduler = self._scheduler, address
        self._announce()
        if last not in (None, address):
            # It must not continue to pair instances by old loads.
            self._mailbox.send(last, Membership(self._version, (), (), None))

    def _announce(self) -> None:
        self._version += 1
        scheduler = self._scheduler or self._mailbox.address
        membership = Membership(
            self._version,
            tuple(InstanceMember(i, address) for i, address in self._addresses.items()),
            (FrontendMember(FRONTEND, self._mailbox.address),),
            scheduler,
        )
        for address in {*self._addresses.values(), scheduler}:
            self._mailbox.send(address, membership)

    # ------------------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Any,
        instance: str,
        *,
        num_outputs: int,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Stream:
        """Send a greedy request that generates `num_outputs` tokens, unless it is aborted.

        Args:
            prompt: token ids, or a prompt as vLLM's `InputProcessor` takes it.
            more: further arguments of its `process_inputs`.
        """
        number = next(self._numbers)
        request = self._processor.process_inputs(
            f"r{number}",
            TokensPrompt(prompt_token_ids=prompt) if isinstance(prompt, list) else prompt,
            SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True),
            ("generate",),
            **more,
        )
        request.client_index = FRONTEND
        stream = Stream(
            RequestId(request.request_id),
            encode_request(request),
            len(request.prompt_token_ids),
            instance,
        )
        self._streams[stream.request_id] = stream
        self._mailbox.send(
            self._addresses[InstanceId(instance)],
            AddRequest(FRONTEND, stream.request_id, number),
            [stream.payload],
        )
        return stream

    def send_again(self, stream: Stream, instance: str) -> None:
        """Continue a request whose instance has died on another one, behind the tokens so far, as
        front ends do (`frontend.requests.attempts`)."""
        number = next(self._numbers)
        token_ids = stream.token_ids()
        stream.request_id = RequestId(f"{stream.request_id}{ATTEMPT_MARK}1")
        stream.instance = instance
        stream.num_outputs = len(token_ids)
        self._streams[stream.request_id] = stream
        self._mailbox.send(
            self._addresses[InstanceId(instance)],
            AddRequest(FRONTEND, stream.request_id, number, tuple(token_ids)),
            [renamed_request(stream.payload, stream.request_id)],
        )

    def abort(self, stream: Stream) -> None:
        """End the request; later tokens of it are dropped."""
        del self._streams[stream.request_id]
        self._mailbox.send(
            self._addresses[InstanceId(stream.instance)], AbortRequests((stream.request_id,))
        )

    async def move(self, stream: Stream, destination: str, mode: Mode) -> dict[str, Any]:
        """Migrate the request; returns the source's report of the migration.

        Raises:
            RuntimeError: the migration did not commit.
        """
        query_id = next(self._numbers)
        reply = self._replies[query_id] = asyncio.get_running_loop().create_future()
        order = MigrateRequest(
            self._mailbox.address, query_id, stream.request_id, InstanceId(destination), mode
        )
        self._mailbox.send(self._addresses[InstanceId(stream.instance)], order)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            answer = await reply
        if answer.error is not None:
            raise RuntimeError(f"{stream.request_id} did not move: {answer.error}")
        report: dict[str, Any] = msgspec.json.decode(answer.body)
        return report

    async def until_idle(self) -> None:
        """Wait until all instances report that they hold nothing; they report here only without
        another scheduler."""
        self._loads.clear()
        async with asyncio.timeout(HANG_TIMEOUT_S):
            while not self._is_idle():
                self._loads_changed.clear()
                await self._loads_changed.wait()

    def _is_idle(self) -> bool:
        loads = self._loads.values()
        is_empty = all(not (load.used_tokens or load.num_running) for load in loads)
        return len(loads) == len(self._actors) and is_empty

    # ------------------------------------------------------------------------------ messages

    def _handle(self, message: Any, frames: list[bytes]) -> None:
        match message:
            case TokenBatch(instance_id, spans):
                now_s = time.monotonic()
                for span, payload in zip(spans, frames, strict=True):
                    stream = self._streams.get(span.request_id)
                    if stream is None:
                        continue
                    if span.num_tokens:
                        arrival = Arrival(now_s, instance_id, span.first_index, span.num_tokens)
                        stream.add(arrival, payload)
                    if span.is_finished:
                        stream.finish()
                        del self._streams[span.request_id]
            case RequestsMoved(instance_id, request_ids):
                for request_id in request_ids:
                    if request_id in self._streams:
                        self._streams[request_id].instance = instance_id
            case AdminReply(query_id):
                self._replies.pop(query_id).set_result(message)
            case LoadReport(load):
                self._loads[load.instance_id] = load
                self._loads_changed.set()


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """A Ray for this process; none of its processes outlives this one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # With Ray's default of 15, any other process of the machine could delay every hand-over.
    os.environ.setdefault("RAY_worker_niceness", "0")
    reaper = Reaper()
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level="warning",
            log_to_driver=False,
            object_store_memory=80 << 20,
        )
        yield
    finally:
        ray.shutdown()
        reaper.close()
