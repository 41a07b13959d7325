"""Utility calls: vLLM's server calls methods of its one engine, which are several instances here.

A call that changes or returns the state of an engine goes to every instance, and their results are
merged. A call that one instance is to carry out goes to one, and where only the answer counts, the
first one does: an instance may be in a long step, or hang. Instances that join later do not get
earlier calls: after updates of weights they exchange no KV with the others (`WeightUpdates`).
With each call an instance gets its place among those that are called, by which vLLM numbers ranks.

As in vLLM, a call may take any time: it ends with its answer, or with its instance.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sterna.engine.vllm.payload import (
    UtilityCall,
    decode_outputs,
    decode_utility_call,
    encode_utility_result,
)
from sterna.errors import UnansweredError
from sterna.frontend.peers import Peers, Questions
from sterna.messages.actors import CallUtility
from sterna.types import FrontendId, InstanceId

logger = logging.getLogger(__name__)

Merge = Callable[[str, Sequence[Any]], Any]


class UtilityError(Exception):
    """The call failed; the message goes to vLLM's server, which raises it to its caller."""


def _all_true(method: str, results: Sequence[Any]) -> Any:
    """Whether the call succeeded everywhere; None for a method without a result."""
    return None if results[0] is None else all(results)


def _concatenated(method: str, results: Sequence[Any]) -> Any:
    """The workers of all instances, in the order of the instances."""
    return [each for result in results for each in result]


def _common(method: str, results: Sequence[Any]) -> Any:
    """The values that every instance has."""
    return sorted(set.intersection(*map(set, results)))


def _agreed(method: str, results: Sequence[Any]) -> Any:
    if any(result != results[0] for result in results):
        raise UtilityError(f"the instances answer {method} differently: {list(results)}")
    return results[0]


# Methods of vLLM's engine-core client; None: one instance carries it out. Methods of vLLM's
# development mode that pause the engine or put it to sleep are left out: requests that end by them
# are reported to clients only by vLLM's own engine process.
_METHODS: Mapping[str, Merge | None] = MappingProxyType(
    {
        "add_lora": _all_true,
        "collective_rpc": _concatenated,
        "compute_weight_checksums": _concatenated,
        "execute_dummy_batch": _all_true,
        "get_weight_version": _agreed,
        "is_scheduler_paused": _agreed,
        "is_sleeping": _agreed,
        "list_loras": _common,
        "pin_lora": _all_true,
        "profile": _all_true,
        "release_kv_cache_memory": _all_true,
        "remove_lora": _all_true,
        "reset_encoder_cache": _all_true,
        "reset_mm_cache": _all_true,
        "reset_prefix_cache": _all_true,
        "save_sharded_state": None,
        "set_weight_version": _all_true,
    }
)


ALIKE = "get_supported_tasks"
"""A method that only returns what is the same everywhere; a front end that starts waits for it."""

PRELOADING = "add_lora"
"""A method that front ends call for each adapter of `--lora-modules` when they start. An instance
without the adapter loads it for the first request that needs it, so that a start waits for one."""


class Utilities:
    """Carries out one front end's utility calls.

    Attributes:
        is_starting: vLLM's server is being made, and no caller of the API can have called.
    """

    def __init__(self, frontend_id: FrontendId, peers: Peers) -> None:
        self.is_starting = True
        self._frontend_id = frontend_id
        self._peers = peers
        self._questions: Questions[bytes] = Questions(None)

    async def answer(self, payload: bytes) -> bytes:
        """Return the outputs that answer the call; a failure is an answer too."""
        call = decode_utility_call(payload)
        try:
            result = await self._call(call, payload)
        except (UtilityError, UnansweredError) as error:
            logger.warning("utility call failed method=%s reason=%s", call.method, error)
            return encode_utility_result(call.call_id, failure=str(error))
        return encode_utility_result(call.call_id, result)

    def on_result(self, call_id: int, payload: bytes) -> None:
        """An instance has answered."""
        self._questions.on_answer(call_id, payload)

    def on_instances(self, live: Sequence[InstanceId]) -> None:
        """Give up the calls to instances that are not among these."""
        self._questions.on_instances(live)

    async def _call(self, call: UtilityCall, payload: bytes) -> Any:
        if call.method not in _METHODS and call.method != ALIKE:
            raise UtilityError(f"{call.method} cannot be called on the instances of a cluster")
        instances = self._peers.instances
        if not instances:
            raise UtilityError(f"there is no instance to call {call.method} on")
        if call.method == ALIKE or (call.method == PRELOADING and self.is_starting):
            return await self._call_any(instances, call.method, payload)
        merge = _METHODS[call.method]
        if merge is None:
            return await self._call_one(0, instances[0], call.method, payload)
        calls = (
            self._call_one(place, each, call.method, payload)
            for place, each in enumerate(instances)
        )
        return merge(call.method, await asyncio.gather(*calls))

    async def _call_any(self, instances: Sequence[InstanceId], method: str, payload: bytes) -> Any:
        """The first result of any of them; the last one's error where none has one."""
        calls = [
            asyncio.ensure_future(self._call_one(place, each, method, payload))
            for place, each in enumerate(instances)
        ]
        error: Exception | None = None
        try:
            for call in asyncio.as_completed(calls):
                try:
                    return await call
                except (UtilityError, UnansweredError) as its_error:
                    error = its_error
        finally:
            for each in calls:
                each.cancel()
        assert error is not None, "there is an instance"
        raise error

    async def _call_one(
        self, place: int, instance_id: InstanceId, method: str, payload: bytes
    ) -> Any:
        def send(call_id: int) -> None:
            message = CallUtility(self._frontend_id, call_id, method, place)
            if not self._peers.send_to_instance(instance_id, message, [payload]):
                raise UtilityError(f"instance {instance_id} cannot be sent the call of {method}")

        output = decode_outputs(await self._questions.ask(instance_id, send)).utility_output
        if output.failure_message is not None:
            raise UtilityError(f"instance {instance_id}: {output.failure_message}")
        return output.result.result
