"""vLLM's KV offloading (`OffloadingConnector`) beside migrations.

The connector saves full blocks in the host's memory, some steps after they were computed, possibly
when their request has ended and they are free, and loads them for later requests. It learns of
requests, and of blocks that get other owners, from vLLM's queues and steps. A migration passes by
these; here the connector is told.

All methods run on the engine's thread.
"""

import itertools
from collections.abc import Iterable, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import Request

NAME = "OffloadingConnector"


class Offloading:
    """The connector's records of requests that arrive and leave by migration."""

    def __init__(self, connector: OffloadingConnectorScheduler) -> None:
        self._connector = connector
        self._departures = itertools.count()

    def arrive(self, request: Request, block_ids: Sequence[list[int]]) -> None:
        """Let the connector save the blocks of a request that was adopted with them."""
        self._connector.on_new_request(request)
        status = self._connector._req_status[request.request_id]
        status.update_offload_keys()
        status.update_block_id_groups(tuple(block_ids))

    def leave(self, request: Request) -> None:
        """End the record of a request that has left, and whose blocks are free.

        Blocks of which a copy has begun are saved under another name: the request may come back
        before that has ended, and the connector has one record for a name.
        """
        status = self._connector._req_status.pop(request.request_id, None)
        if status is None:
            return
        status.finished_signaled = True
        self._connector.manager.on_request_finished(status.req_context)
        if status.transfer_jobs:
            name = f"{request.request_id} left {next(self._departures)}"
            self._connector._req_status[name] = status
            for job in status.transfer_jobs:
                self._connector._jobs[job].req_id = name

    def unsaved(self) -> set[int]:
        """Return ids of blocks that may be free already, but are still to be saved: nothing may be
        written there, as vLLM waits for the copy before it uses them again."""
        unsaved = set(self._connector._block_id_to_pending_jobs)
        for status in self._connector._req_status.values():
            if status.req.is_finished() and not status.finished_signaled:
                # Its last blocks are looked through in the next step.
                for group in status.group_states:
                    unsaved.update(group.block_ids)
        return unsaved

    def use(self, block_ids: Iterable[int]) -> None:
        """Let the connector forget that these blocks belonged to windows that have moved on and
        were not saved in time."""
        used = set(block_ids)
        for status in self._connector._req_status.values():
            for number in self._connector._sliding_window_groups:
                ids = status.group_states[number].block_ids
                ids[:] = [0 if each in used else each for each in ids]
