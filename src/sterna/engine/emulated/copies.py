"""Copies between emulated engines: they take the profile's time and carry no KV.

Each stage has a connection of its own from the source to the destination. It begins with the
destination's token and the stage's id, and ends with one byte after the time of the stage. A
connection that breaks before means that the source has died; a copy that the source cancels ends
with another byte, and the state machines of the migration decide what follows.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Callable

import msgspec

from sterna.engine.emulated.durations import CopyTime
from sterna.errors import UNREADABLE
from sterna.migration.messages import CopyEvent, CopyFailed, StageFailed, StageReceived
from sterna.types import MigrationId

logger = logging.getLogger(__name__)

COPIED = b"\x01"
DROPPED = b"\x00"
LENGTH_BYTES = 4
MAX_HELLO_BYTES = 4096
"""A caller that announces more is not a peer."""

TOKEN_BYTES = 16

MAX_STRANGERS = 32
"""Limit of connections without a token so far; peers send theirs at once."""


class _Stage(msgspec.Struct, frozen=True, array_like=True):
    migration_id: MigrationId
    number: int


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    token: str
    stage: _Stage


class Copies:
    """The copies from and to one engine; belongs to one asyncio loop.

    Copies from one engine follow each other, as if on one link.

    Args:
        host: the address on which the engine listens for its peers.
        on_transfer: called with the outcome of each stage.
    """

    def __init__(
        self, host: str, copy_time: CopyTime, on_transfer: Callable[[MigrationId, CopyEvent], None]
    ) -> None:
        self._host = host
        self._copy_time = copy_time
        self._on_transfer = on_transfer
        self._link = asyncio.Lock()
        self._sending: dict[_Stage, asyncio.Task[None]] = {}
        self._arriving: set[_Stage] = set()
        self._receiving: set[asyncio.Task[None]] = set()
        # Connections without a token so far, in the order in which they were accepted.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._address = ""

    async def open(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._receive, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._address = f"{self._host}:{port}/{self._token}"

    @property
    def num_strangers(self) -> int:
        """Connections that have not sent the token so far."""
        return len(self._strangers)

    async def close(self) -> None:
        """Drop all copies and stop listening; to peers it looks like a death."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._sending.values(), *self._receiving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------- source

    def send(
        self, migration_id: MigrationId, number: int, num_blocks: int, receivers: tuple[str, ...]
    ) -> None:
        """Deliver the stage to the receiver after the time that it takes."""
        stage = _Stage(migration_id, number)
        task = asyncio.create_task(self._send(stage, num_blocks, receivers[0]))
        self._sending[stage] = task
        task.add_done_callback(lambda _: self._sending.pop(stage, None))

    def stop_sending(self, migration_id: MigrationId) -> None:
        """Cancel the migration's stages that are not sent yet."""
        for stage, task in self._sending.items():
            if stage.migration_id == migration_id:
                task.cancel()

    async def _send(self, stage: _Stage, num_blocks: int, receiver: str) -> None:
        address, _, token = receiver.rpartition("/")
        host, _, port = address.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            self._fail(stage, error)
            return
        try:
            hello = msgspec.msgpack.encode(_Hello(token, stage))
            writer.write(len(hello).to_bytes(LENGTH_BYTES, "big") + hello)
            async with self._link:
                await asyncio.sleep(self._copy_time.stage_duration_s(num_blocks))
            if writer.is_closing():
                # Another loop than asyncio's raises no OSError when this is written to.
                raise ConnectionResetError("the destination has closed the connection")
            writer.write(COPIED)
            await writer.drain()
        except OSError as error:
            self._fail(stage, error)
        except asyncio.CancelledError:
            if self._server is not None and self._server.is_serving():
                writer.write(DROPPED)
            raise
        finally:
            writer.close()

    def _fail(self, stage: _Stage, error: OSError) -> None:
        logger.warning("copy failed migration=%s reason=%s", stage.migration_id, error)
        self._on_transfer(stage.migration_id, CopyFailed(stage.number))

    # -------------------------------------------------------------------------- destination

    def expect(self, migration_id: MigrationId, number: int, num_blocks: int) -> tuple[str, ...]:
        """Expect the stage; returns the receivers that its source must send to."""
        if num_blocks > 0:
            self._arriving.add(_Stage(migration_id, number))
        return (self._address,)

    def forget(self, migration_id: MigrationId) -> None:
        """Expect no further stage of the migration."""
        self._arriving = {each for each in self._arriving if each.migration_id != migration_id}

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._receiving.add(task)
        if len(self._strangers) >= MAX_STRANGERS:
            logger.warning("connection cut, it did not say the token in time")
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None
        try:
            if (stage := await self._greet(reader)) is None:
                return
            self._strangers.pop(task, None)
            ending = b""
            with contextlib.suppress(OSError):
                ending = await reader.read(1)
        except (OSError, asyncio.IncompleteReadError, *UNREADABLE) as error:
            # A copy that was cancelled before it began, or a caller that is not a peer.
            logger.debug("connection ended without a copy reason=%s", error)
            return
        finally:
            self._receiving.discard(task)
            self._strangers.pop(task, None)
            writer.close()
        if stage in self._arriving and ending != DROPPED:
            self._arriving.discard(stage)
            is_copied = ending == COPIED
            event = StageReceived(stage.number) if is_copied else StageFailed(stage.number)
            self._on_transfer(stage.migration_id, event)

    async def _greet(self, reader: asyncio.StreamReader) -> _Stage | None:
        """Return the stage that a peer sends; None: the caller is not a peer."""
        num_bytes = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if num_bytes > MAX_HELLO_BYTES:
            return None
        hello = msgspec.msgpack.decode(await reader.readexactly(num_bytes), type=_Hello)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            logger.warning("connection ended, the caller does not know the token")
            return None
        return hello.stage
