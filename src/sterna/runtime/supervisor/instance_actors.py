"""The actors that host instances: placed, started, watched, ended (Section 5)."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from sterna.config import ClusterConfig
from sterna.engine.emulated.emulated_engine import EmulatedOptions
from sterna.engine.interface import EngineFacts
from sterna.engine.vllm.guard import installed_versions
from sterna.errors import InstanceStartError
from sterna.runtime.actors.actor_classes import EQUAL_PACKAGES, InstanceActor, InstanceSpec
from sterna.runtime.actors.addresses import is_gcs_up, own_node
from sterna.runtime.actors.member_status import MemberStatus
from sterna.runtime.fork_server.launcher import forked_runtime_env
from sterna.runtime.supervisor.placement import Place, find_place
from sterna.runtime.supervisor.recovery import INSTANCE
from sterna.runtime.supervisor.tasks import Tasks
from sterna.runtime.supervisor.watch import (
    START_TIMEOUT_S,
    NotStartedError,
    Watch,
    forget,
    process_of,
)
from sterna.supervisor.core import HostedInstance
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.types import InstanceId

OF_ONE_MACHINE = ("_KEY", "_IP", "_HOST", "_PORT")
"""Endings of vLLM's variables that other nodes do not get: secrets and addresses."""

CLOSE_TIMEOUT_S = 10.0
"""Time for an empty instance to release everything; then its process is killed."""


def server_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of vLLM that the user has set on the server's machine, for the instances
    of other nodes: these have the environment of `sterna join`."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("VLLM_") and not name.endswith(OF_ONE_MACHINE)
    }


def _short(kv_format: str) -> str:
    """A digest of an engine's KV format, which has hundreds of characters: every membership has it
    for each instance, and goes to each of them."""
    return hashlib.blake2b(kv_format.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _HostedActor:
    """The actor of an instance that is up.

    Attributes:
        kv_format: a digest of that of its `EngineFacts`.
        actor: None if its supervisor died and the successor cannot reach it.
        weight_updates: that of its last heartbeat.
    """

    actor: Any | None
    address: str
    kv_format: str
    place: Place | None
    process: ProcessIdentity
    weight_updates: str = ""


class InstanceActors:
    """All instances that are up.

    Args:
        args: the pickled options of `vllm serve`.
        emulated: the engine that instances emulate; None for vLLM.
        environment: environment variables of processes that run vLLM.
        watch: detects the ends of instances.
        tasks: runs the cleanup after their ends.
        drained_nodes: that of `find_place`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        args: bytes,
        emulated: EmulatedOptions | None,
        environment: dict[str, str],
        watch: Watch,
        tasks: Tasks,
        drained_nodes: Callable[[], Collection[str]],
    ) -> None:
        self._config = config
        self._args = args
        self._emulated = emulated
        self._environment = environment
        self._watch = watch
        self._tasks = tasks
        self._versions = installed_versions(*EQUAL_PACKAGES)
        self._drained_nodes = drained_nodes
        self._server_variables = server_variables(os.environ)
        self._hosted: dict[InstanceId, _HostedActor] = {}

    def hosted(self) -> dict[InstanceId, HostedInstance]:
        """Every instance that is up."""
        return {
            each: HostedInstance(
                hosted.address, hosted.kv_format + hosted.weight_updates, hosted.process
            )
            for each, hosted in self._hosted.items()
        }

    @property
    def compute_on_cpu(self) -> bool:
        """Whether engines compute, and do so on the CPU."""
        return self._emulated is None and self._config.num_gpus_per_instance == 0

    async def start(
        self,
        instance_id: InstanceId,
        options: tuple[str, ...],
        on_pending: Callable[[str], None],
        on_placed: Callable[[str], None],
    ) -> EngineFacts:
        """Start an instance as soon as there is a place for it.

        Args:
            options: further options of vLLM, which overrule those of `vllm serve`.
            on_pending: that of `find_place`.
            on_placed: called with the address of the node that has a place.

        Raises:
            InstanceStartError: it did not start, and nothing is left of it.
        """
        config = self._config
        if not is_gcs_up():
            raise InstanceStartError(
                f"instance {instance_id}: Ray's GCS does not answer", is_of_options=False
            )
        place, node = await find_place(
            instance_id,
            config.cpus_per_instance,
            config.num_gpus_per_instance,
            self._drained_nodes,
            on_pending,
            self._tasks,
        )
        on_placed(node)
        # An emulated engine does not use the imports that a fork has.
        runtime_env = forked_runtime_env() if self._emulated is None else {}
        name = f"{INSTANCE}{instance_id}"
        actor = None
        facts: EngineFacts
        try:
            actor = InstanceActor.options(
                **place.options(), runtime_env=runtime_env, **surviving_as(name)
            ).remote(name)
            process = await process_of(instance_id, actor, START_TIMEOUT_S)
            start = self._begin(actor, self._spec(instance_id, options))
            # No timeout: a model may take any time to load.
            address, facts = await self._watch.until_started(instance_id, process, start)
        except (ray.exceptions.RayError, NotStartedError, InstanceStartError) as error:
            if actor is not None:
                await kill(actor)
            await place.give_back()
            if isinstance(error, NotStartedError):
                raise InstanceStartError(f"instance {error}") from error
            # Ray's error of a call that raised an InstanceStartError is one of these, too.
            if not isinstance(error, ray.exceptions.RayError):
                raise
            has_cause = isinstance(error, ray.exceptions.RayTaskError)
            reason = f": {error.cause}" if has_cause else " died while starting"
            raise InstanceStartError(f"instance {instance_id}{reason}") from error
        kv_format = _short(facts.kv_format)
        self._hosted[instance_id] = _HostedActor(actor, address, kv_format, place, process)
        return facts

    async def _begin(self, actor: Any, spec: InstanceSpec) -> tuple[str, EngineFacts]:
        """Start the instance of an actor, as `_InstanceActor.start`.

        Raises:
            InstanceStartError: its node has other versions than the server.
        """
        # Asked first: another version of Sterna may not be able to read the specification.
        node, versions = await actor.versions.remote()
        if versions != self._versions:
            raise InstanceStartError(
                f"instance {spec.instance_id}: node {node} has {_spelt(versions)}, and the server "
                f"{_spelt(self._versions)}: install the server's versions there",
                is_of_options=False,
            )
        started: tuple[str, EngineFacts] = await actor.start.remote(spec)
        return started

    def _spec(self, instance_id: InstanceId, options: tuple[str, ...]) -> InstanceSpec:
        config = self._config
        return InstanceSpec(
            instance_id,
            packed_args=self._args,
            options=options,
            llumlet=config.llumlet,
            transport=config.transport,
            host=config.internal_host,
            environment=self._environment,
            log_level=config.log_level,
            emulated=self._emulated,
            keys=config.mailbox_keys,
            lease=(own_node(), config.watch.lease_s),
            server_variables=self._server_variables,
        )

    def take_over(
        self, instance_id: InstanceId, actor: Any, status: MemberStatus, place: Place
    ) -> None:
        """Host an instance that another supervisor has started."""
        assert status.facts is not None
        self._hosted[instance_id] = _HostedActor(
            actor,
            status.address,
            _short(status.facts.kv_format),
            place,
            status.process,
            status.weight_updates,
        )

    def take_over_silent(
        self, instance_id: InstanceId, silent: HostedInstance, place: Place | None
    ) -> None:
        """Host an instance that another supervisor has started, and that does not answer this one:
        it is to end."""
        assert silent.process is not None
        self._hosted[instance_id] = _HostedActor(
            None, silent.address, silent.kv_format, place, silent.process
        )

    def on_weights(self, instance_id: InstanceId, weight_updates: str) -> bool:
        """Note the updates of an instance's weights; returns whether they are others than before,
        and the members have to know it."""
        hosted = self._hosted.get(instance_id)
        if hosted is None or hosted.weight_updates == weight_updates:
            return False
        self._hosted[instance_id] = replace(hosted, weight_updates=weight_updates)
        return True

    def address(self, instance_id: InstanceId) -> str | None:
        """Return the mailbox of an instance; None if it is not up."""
        hosted = self._hosted.get(instance_id)
        return None if hosted is None else hosted.address

    async def ended(self, instance_id: InstanceId) -> str:
        """Wait until the instance ends, by itself or by `close`, or stops working. Returns the
        reason, when it is certain that the instance no longer acts."""
        hosted = self._hosted[instance_id]
        reason = await self._watch.until_ended(instance_id, hosted.actor, hosted.process)
        del self._hosted[instance_id]
        # A task of its own: the caller does not wait for Ray.
        self._tasks.begin(_clear_away(hosted))
        return reason

    async def close(self, instance_id: InstanceId) -> None:
        """End an instance in good order; `ended` returns then."""
        hosted = self._hosted.get(instance_id)
        if hosted is None or hosted.actor is None:
            return  # It has died, or is ending already.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await settle(hosted.actor.close.remote())
        await forget(hosted.actor)

    async def close_all(self) -> None:
        """End all engines in good order; their processes end with Ray."""
        actors = [hosted.actor for hosted in self._hosted.values()]
        await settle(*(actor.close.remote() for actor in actors if actor is not None))


def _spelt(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


async def _clear_away(hosted: _HostedActor) -> None:
    """Report to Ray that an instance has ended, and give its place back."""
    if hosted.actor is not None:
        await forget(hosted.actor)
    if hosted.place is not None:
        await hosted.place.give_back()


def surviving_as(name: str) -> dict[str, Any]:
    """Return the options with which an actor outlives its supervisor, whose successor finds it by
    this name."""
    return {"name": name, "lifetime": "detached"}


async def kill(actor: Any) -> None:
    """Kill the actor; returns when Ray knows that it is dead."""
    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayError):
        await actor.process.remote()


async def settle(*references: Any) -> None:
    """Wait for calls of actors that may already be dead."""
    await asyncio.gather(*references, return_exceptions=True)
