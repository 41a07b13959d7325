"""The data plane of one instance: its transfers, connections and threads.

Threads: one that listens, one that notifies the owner of outcomes, one that waits for the engine's
steps, one for each peer that is sent to and one for each peer that sends (with Gloo, two for the
latter). All sleep while nothing is copied; those of a connection that was idle for
`TransportConfig.idle_timeout_s` end.
"""

import atexit
import ipaddress
import logging
import secrets
import threading
import time
from collections.abc import Callable

import torch

from sterna.config import TransportConfig
from sterna.errors import ConfigurationError, TransportError
from sterna.transport.data_plane import BlockIds, DataPlane, Notify, Transfer
from sterna.transport.fences import FenceWaiter
from sterna.transport.ledger import Copy, Ledger, Side
from sterna.transport.memory.chunks import largest_chunk_bytes
from sterna.transport.memory.layout import KvCache
from sterna.transport.pacer import Pacer
from sterna.transport.plane_context import PlaneContext
from sterna.transport.receiver import Receiver
from sterna.transport.sender import Peer, Sender
from sterna.transport.wires.channel import Wire
from sterna.transport.wires.shm import ShmWire
from sterna.transport.wires.tcp import TcpWire
from sterna.transport.wires.waiting import Waker, wait
from sterna.types import MigrationId

_logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_CLOSE_S = 0.9
_ACCEPT_RETRY_S = 0.5
_MAX_MARKS = 256
"""Limit of migrations whose last step is marked. A mark stays behind where no last stage is sent:
on ranks that send nothing, and in migrations that end before."""

_MAX_STRANGERS = 32
"""Limit of connections without a token so far; peers send theirs within milliseconds."""


def make_data_plane(config: TransportConfig, cache: KvCache, notify: Notify) -> DataPlane:
    """A data plane over the cache, listening and ready, its staging memory touched.

    Args:
        notify: called with the outcomes, one at a time, on a thread of the plane's own.

    Raises:
        ConfigurationError: peers cannot connect to `config.host`.
        OSError: the plane cannot listen there.
    """
    return _Plane(config, cache, notify)


class _Plane:
    def __init__(self, config: TransportConfig, cache: KvCache, notify: Notify) -> None:
        self._cache = cache
        self._wire = _make_wire(config, cache)
        self._listener, address = self._wire.listen()
        self._listener.setblocking(False)
        self._context = PlaneContext(
            wire=self._wire,
            cache=cache,
            ledger=Ledger(notify, config.timeout_s),
            # A receiver waits for `timeout_s`; pauses must stay well below it.
            pacer=Pacer(config.bandwidth_share, config.timeout_s / 4),
            token=secrets.token_hex(_TOKEN_BYTES),
            chunk_bytes=config.chunk_bytes,
            timeout_s=config.timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )
        self._begin_timeout_s = config.begin_timeout_s
        self._fences = FenceWaiter(cache.device)
        self._endpoint = f"{self._wire.kind}://{address}/{self._context.token}"
        self._lock = threading.Lock()
        # Set by the thread of the engine's steps, taken by the one that sends; in order of age.
        self._marks: dict[MigrationId, torch.cuda.Event] = {}
        self._senders: dict[str, Sender] = {}
        # In the order in which they were accepted.
        self._receivers: dict[Receiver, None] = {}
        self._is_closed = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._listen, name="sterna-kv-listen", daemon=True)
        self._thread.start()
        # A process that ends with Gloo's threads alive is aborted by the C++ runtime.
        atexit.register(self.close)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def send(
        self, transfer: Transfer, endpoint: str, block_ids: BlockIds, *, is_paced: bool
    ) -> None:
        fence = self._fence_of_steps(transfer, is_paced)
        copy = self._add(Side.SOURCE, transfer, block_ids, is_paced, fence)
        if not is_paced:
            self._marks.pop(transfer.migration_id, None)
        try:
            peer = _parse(endpoint, self._wire.kind)
        except TransportError as error:
            self._context.ledger.fail(copy, str(error))
            return
        with self._lock:
            sender = self._senders.get(endpoint)
            if self._is_closed or (sender is not None and sender.submit(copy)):
                return
            try:
                sender = Sender(peer, self._context, self._forget_sender)
                sender.submit(copy)
                sender.start()
            except (OSError, RuntimeError) as error:
                # There is no descriptor left, or no thread.
                _logger.error("kv connection not opened peer=%s error=%s", peer.address, error)
                self._context.ledger.fail(copy, f"cannot connect to {peer.address}: {error}")
                return
            self._senders[endpoint] = sender

    def _fence_of_steps(self, transfer: Transfer, is_paced: bool) -> "torch.cuda.Event | None":
        """The steps that a copy from here waits for."""
        if transfer.hop is not None:
            # The copy to here has waited: no step writes to the blocks any longer.
            return None
        mark = None if is_paced else self._marks.get(transfer.migration_id)
        return self._cache.fence() if mark is None else mark

    def mark_steps(self, migration_id: MigrationId) -> None:
        fence = self._cache.fence()
        if fence is None:
            return
        self._marks[migration_id] = fence
        for oldest in list(self._marks)[:-_MAX_MARKS]:
            self._marks.pop(oldest, None)

    def receive(
        self, transfer: Transfer, block_ids: BlockIds, on_armed: Callable[[], None]
    ) -> None:
        # All groups have their blocks from one pool.
        ids = [block_id for group in block_ids for block_id in group]
        if len(set(ids)) != len(ids):
            raise TransportError(f"{transfer} would scatter twice into one of {ids}")
        copy = self._add(Side.DESTINATION, transfer, block_ids, False, self._cache.fence())
        self._fences.call_after(copy.fence, on_armed)

    def stop(self, migration_id: MigrationId) -> None:
        self._marks.pop(migration_id, None)
        self._context.ledger.stop(migration_id)

    def close(self) -> None:
        deadline_s = time.monotonic() + _CLOSE_S
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections: list[Receiver | Sender] = [*self._receivers, *self._senders.values()]
        # From here on only a chunk in progress touches blocks; its thread is joined below.
        self._context.ledger.close()
        self._fences.close()
        self._waker.set()
        for connection in connections:
            connection.close()
        threads = [self._thread, self._fences.thread]
        for thread in [*threads, *(connection.thread for connection in connections)]:
            if thread is not threading.current_thread():
                thread.join(max(deadline_s - time.monotonic(), 0.0))
                if thread.is_alive():
                    _logger.debug("kv thread still busy at close thread=%s", thread.name)
        self._context.ledger.join(max(deadline_s - time.monotonic(), 0.0))
        self._listener.close()
        self._wire.close()
        self._waker.close()
        atexit.unregister(self.close)

    def _add(
        self,
        side: Side,
        transfer: Transfer,
        block_ids: BlockIds,
        is_paced: bool,
        fence: "torch.cuda.Event | None",
    ) -> Copy:
        num_groups = len(self._cache.groups)
        if len(block_ids) != num_groups:
            raise TransportError(
                f"{transfer} has blocks of {len(block_ids)} KV cache groups, not of {num_groups}"
            )
        for block_id in (block_id for group in block_ids for block_id in group):
            if not 0 <= block_id < self._cache.num_blocks:
                raise TransportError(
                    f"{transfer} names block {block_id}, but the cache has "
                    f"{self._cache.num_blocks} blocks"
                )
        now_s = time.monotonic()
        # A hop is due only when its lead has the stage, whose failure fails both.
        is_due = side is Side.DESTINATION and transfer.hop is None
        copy = Copy(
            side=side,
            transfer=transfer,
            block_ids=tuple(torch.tensor(list(ids), dtype=torch.int64) for ids in block_ids),
            block_bytes=self._cache.block_bytes,
            fence=fence,
            is_paced=is_paced,
            begun_s=now_s,
            deadline_s=now_s + self._begin_timeout_s if is_due else None,
        )
        self._context.ledger.add(copy)
        return copy

    def _listen(self) -> None:
        while not self._is_closed:
            if not wait(self._waker, self._listener):
                continue
            try:
                self._accept()
            except (OSError, RuntimeError) as error:
                # The caller hung up, or the process is out of descriptors or threads: pause, so as
                # not to spin.
                _logger.warning("kv connection not accepted error=%s", error)
                wait(self._waker, timeout_s=_ACCEPT_RETRY_S)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        with self._lock:
            if self._is_closed:
                sock.close()
                return
            strangers = [each for each in self._receivers if not each.is_greeted]
            if len(strangers) >= _MAX_STRANGERS:
                # Callers without a token must not use up the threads that peers need.
                _logger.warning("kv connection cut, it did not say the token in time")
                strangers[0].close()
                del self._receivers[strangers[0]]
            receiver = Receiver(sock, self._context, self._forget_receiver)
            self._receivers[receiver] = None
            try:
                receiver.start()
            except RuntimeError:
                del self._receivers[receiver]
                raise

    def _forget_receiver(self, receiver: Receiver) -> None:
        with self._lock:
            self._receivers.pop(receiver, None)

    def _forget_sender(self, sender: Sender) -> None:
        with self._lock:
            for endpoint, known in list(self._senders.items()):
                if known is sender:
                    del self._senders[endpoint]


def _make_wire(config: TransportConfig, cache: KvCache) -> Wire:
    slot_bytes = largest_chunk_bytes(cache.page_bytes, config.chunk_bytes)
    if config.kind == "shm":
        return ShmWire(slot_bytes, cache.device)
    _require_reachable(config.host)
    if config.kind == "tcp":
        return TcpWire(config.host, slot_bytes, cache.device)
    # Imported here, because the other wires also work with a torch that was built without Gloo.
    from sterna.transport.wires.gloo import GlooWire

    return GlooWire(config.host, slot_bytes, cache.device, config.timeout_s)


def _require_reachable(host: str) -> None:
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        # A name.
        return
    if is_wildcard:
        raise ConfigurationError(
            f"the transport's host must be an address that peers can connect to, not {host}"
        )


def _parse(endpoint: str, kind: str) -> Peer:
    scheme, _, rest = endpoint.partition("://")
    address, _, token = rest.rpartition("/")
    if scheme != kind or not address or not token:
        raise TransportError(
            f"endpoint {endpoint!r} is not one of transport {kind!r}: all instances must use the "
            "same transport"
        )
    return Peer(address, token)
