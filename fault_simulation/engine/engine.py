"""An emulated engine in virtual time, whose KV cache can be wrong.

As `engine.emulated.emulated_engine`: commands run between two steps in the order of their calls,
tokens go out when a step ends, then the view. Reports to its instance go, in order, through a queue
with delays of its own, as between a step thread and an event loop.

Blocks have no bytes here, but contents (`kv_cache`). Copies read the blocks of the tables that the
source had when it planned the stage, or drained the request, as `engine.vllm` does. A request whose
step has looked at other KV than its own answers `WRONG`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

import msgspec

from fault_simulation.engine.block_pool import Block, Content
from fault_simulation.engine.engine_kinds import EngineKind
from fault_simulation.engine.grouped_core import GroupedCore
from fault_simulation.engine.immovable import shown_as_immovable
from fault_simulation.engine.kv_cache import KvCache, Tables
from fault_simulation.oracle.token_oracle import (
    WRONG,
    Answer,
    Ask,
    Output,
    Stream,
    encode,
    extend,
    next_token,
)
from fault_simulation.virtual.settings import (
    COPY_TIMEOUT_S,
    LONG_STEP_FACTOR,
    LONG_STEP_SHARE,
    TELL_S,
)
from fault_simulation.virtual.timeline import Process, Timeline, Violation
from sterna.engine.cache_changes import CacheChanges, CacheRecorder
from sterna.engine.emulated import outcomes
from sterna.engine.emulated.requests import EmulatedRequest, RequestState
from sterna.engine.emulated.steps import Token
from sterna.engine.kv_columns import Columns
from sterna.messages.actors import TokenSpan
from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    CopyBlocks,
    CopyEvent,
    Drain,
    Drained,
    DrainRefused,
    EffectWithOutcome,
    FreeReservation,
    Inspect,
    KeepPrefix,
    Outcome,
    Reason,
    ReservationFreed,
    ReserveBlocks,
    ReserveFailed,
    StageFailed,
    StageReceived,
)
from sterna.types import (
    FrontendId,
    InstanceId,
    InstanceView,
    MigrationId,
    RequestId,
    unpacked,
    whose_prefix,
)

Command = Callable[[], None]


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """The state of a drained request that travels with Commit; see `Stream` for the digests."""

    state: RequestState
    digests: list[int]


@dataclass(frozen=True, slots=True)
class Leaving:
    """The blocks of a request that migrates away, as they last were."""

    tables: Tables
    num_valid_tokens: int


@dataclass(slots=True)
class Incoming:
    """A stage that is expected.

    Attributes:
        blocks: into which it is written, in each group.
        num_copying: copies on their way to it.
    """

    stage: int
    blocks: list[list[Block]]
    since_s: float
    num_copying: int = 0


@dataclass(slots=True)
class Prepared:
    """An incoming migration: the request, and the stages that are expected."""

    ask: Ask | None = None
    incoming: dict[int, Incoming] = field(default_factory=dict)


class EngineListener(Protocol):
    """Receives, in order, what an engine does; see `InstanceProcess`."""

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        """A step has produced these."""

    def on_view(self, view: InstanceView) -> None:
        """The state between two steps has changed."""

    def on_cache(self, changes: CacheChanges) -> None:
        """The contents of the prefix cache have changed."""

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        """A migrated request is here."""

    def on_effect_done(self, migration_id: MigrationId, outcome: Outcome) -> None:
        """The outcome of an effect."""

    def on_transfer(self, migration_id: MigrationId, event: CopyEvent) -> None:
        """Something happened to a copy."""


class SimulatedEngine:
    """One engine.

    Args:
        process: dies and hangs with it.
        kind: that of its cluster.
        reports_cache: whether the listener hears of the contents of the prefix cache.

    Attributes:
        tell_s: longest time until the listener hears of what it did.
        all_told_s: the time by which the listener has heard of all that it has done.
    """

    cache_type = KvCache

    def __init__(
        self,
        process: Process,
        listener: EngineListener,
        timeline: Timeline,
        rng: Random,
        kind: EngineKind,
        reports_cache: bool,
    ) -> None:
        self.streams: dict[RequestId, Stream] = {}
        self.cache = self.cache_type(kind, self.streams)
        if reports_cache:
            self.cache.pool.recorder = CacheRecorder()
        self.core = GroupedCore(self.cache)
        self.leaving: dict[MigrationId, Leaving] = {}
        self.prepared: dict[MigrationId, Prepared] = {}
        self.name = process.name
        self.is_alive = True
        self.is_stalled = False
        self.long_step_share = LONG_STEP_SHARE
        self.tell_s = TELL_S
        self.num_refused = 0
        self._process = process
        self.listener = listener
        self._timeline = timeline
        self._rng = rng
        self._commands: deque[Command] = deque()
        self._is_awake = False
        self._is_between_steps = False
        self.all_told_s = 0.0
        self.is_terminating = False
        self._last_view: InstanceView | None = None

    # ----------------------------------------------------------------------------- requests

    @property
    def num_preemptions(self) -> int:
        """Number of times that the memory of a request was taken back."""
        return self.core.view(InstanceId(self.name)).num_preemptions

    def start(self) -> None:
        """Show the first view."""
        self._do(lambda: None)

    def add(self, ask: Ask, history: tuple[int, ...] = ()) -> None:
        """Queue the request, which has generated these tokens elsewhere."""

        def add() -> None:
            if self.core.progress(ask.request_id) is not None:
                self.num_refused += 1
                return
            stream = self.streams[ask.request_id] = Stream(ask)
            for token_id in history:
                stream.digests.append(extend(stream.digests[-1], token_id))
            self.core.add(
                RequestState(
                    ask.request_id,
                    ask.prompt_tokens,
                    ask.output_tokens,
                    ask.arrival_s,
                    ask.priority,
                    ask.priority,
                    num_output_tokens=len(history),
                )
            )

        self._do(add)

    def abort(self, request_id: RequestId) -> None:
        """End the request, if it is here."""

        def abort() -> None:
            self.core.abort(request_id)
            self.streams.pop(request_id, None)

        self._do(abort)

    def set_terminating(self, is_terminating: bool) -> None:
        """Have views say that the instance is being emptied."""

        def set_terminating() -> None:
            self.is_terminating = is_terminating

        self._do(set_terminating)

    def resume(self, request_id: RequestId) -> None:
        """Carry out `Resume`."""
        self._do(lambda: self.core.resume(request_id))

    def release(self, request_id: RequestId) -> None:
        """Carry out `Release` and `AbortDrained`."""

        def release() -> None:
            self.core.release(request_id)
            self.streams.pop(request_id, None)

        self._do(release)

    def keep_prefix(self, effect: KeepPrefix) -> None:
        """Carry out `KeepPrefix`."""
        hashes = unpacked(effect.block_hashes)
        first_block = effect.first_token // self.cache.kind.config.block_size
        self._do(lambda: self.core.keep_prefix(effect.request_id, hashes, first_block))

    # --------------------------------------------------------------- effects with an outcome

    def carry_out(self, effect: EffectWithOutcome) -> None:
        """Carry the effect out between two steps; `on_effect_done` gets the outcome."""
        if isinstance(effect, FreeReservation | Adopt):
            # Its receivers stop at once.
            if (prepared := self.prepared.get(effect.migration_id)) is not None:
                prepared.incoming.clear()
        elif isinstance(effect, ReserveBlocks) and effect.request:
            ask = msgspec.msgpack.decode(effect.request, type=Ask)
            self.prepared.setdefault(effect.migration_id, Prepared()).ask = ask

        def run() -> None:
            outcome = self._outcome(effect)
            self._tell(lambda: self.listener.on_effect_done(effect.migration_id, outcome))

        self._do(run)

    def _outcome(self, effect: EffectWithOutcome) -> Outcome:
        match effect:
            case Inspect(migration_id, request_id):
                self._note_leaving(migration_id, request_id)
                return outcomes.inspect(self.core, request_id, self._encode)
            case Drain():
                return self._drain(effect)
            case ReserveBlocks():
                return self._reserve(effect)
            case FreeReservation(migration_id):
                self.prepared.pop(migration_id, None)
                self.core.free_reservation(migration_id)
                return ReservationFreed()
            case Adopt():
                return self._adopt(effect)

    def _encode(self, request_id: RequestId) -> bytes:
        if whose_prefix(request_id) is not None:
            return b""
        return encode(self.streams[request_id].ask)

    def _drain(self, effect: Drain) -> Drained | DrainRefused:
        outcome = outcomes.drain(self.core, effect, self._export)
        if isinstance(outcome, Drained):
            self._note_leaving(effect.migration_id, effect.request_id)
        return outcome

    def _export(self, request_id: RequestId) -> bytes:
        if whose_prefix(request_id) is not None:
            return msgspec.msgpack.encode([each.key for each in self.core.prefixes[request_id]])
        return encode(Exported(self.core.export(request_id), self.streams[request_id].digests))

    def _note_leaving(self, migration_id: MigrationId, request_id: RequestId) -> None:
        position = self.core.progress(request_id)
        if position is not None:
            blocks = self.core.prefixes.get(request_id)
            tables = self.cache.tables(request_id) if blocks is None else [[*blocks]]
            self.leaving[migration_id] = Leaving(tables, position.num_valid_tokens)

    def _columns(self, stage: ReserveBlocks | CopyBlocks) -> Columns:
        return self.cache.stage_columns(
            stage.first_block, stage.num_blocks, stage.num_valid_tokens, is_last=stage.is_last
        )

    def _reserve(self, effect: ReserveBlocks) -> BlocksReserved | ReserveFailed:
        columns = self._columns(effect)

        def extend() -> Reason | None:
            needs_slot = effect.is_last and whose_prefix(effect.request_id) is None
            return self.core.reserve_columns(effect.migration_id, columns, needs_slot=needs_slot)

        return outcomes.reserved(self.core, effect, extend, self._expect)

    def _expect(self, effect: ReserveBlocks) -> tuple[str, ...]:
        if effect.num_blocks > 0:
            blocks = self.core.blocks_at(effect.migration_id, self._columns(effect))
            prepared = self.prepared.setdefault(effect.migration_id, Prepared())
            incoming = Incoming(effect.stage, blocks, self._timeline.now_s)
            prepared.incoming[effect.stage] = incoming
            self._await_stage(effect.migration_id, incoming)
        return (self._process.name,)

    def _adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        prepared = self.prepared.pop(effect.migration_id, None)
        if whose_prefix(effect.request_id) is not None:
            self._enter_prefix(effect)
            return Adopted()
        if prepared is None or prepared.ask is None:
            return AdoptFailed(Reason.UNSUPPORTED)
        ask = prepared.ask
        return outcomes.adopt(self.core, effect, lambda: self._take_in(effect, ask))

    def _enter_prefix(self, effect: Adopt) -> None:
        contents = msgspec.msgpack.decode(effect.state, type=list[Content])
        self.core.enter_prefix(effect.migration_id, contents)

    def _take_in(self, effect: Adopt, ask: Ask) -> None:
        exported = msgspec.msgpack.decode(effect.state, type=Exported)
        state = exported.state
        if effect.num_blocks > 0 and not self.core.can_adopt(
            effect.migration_id, state.num_computed_tokens
        ):
            raise Violation(f"{self.name} lacks blocks of {effect.request_id}, which it adopts")
        self.streams[effect.request_id] = Stream(ask, exported.digests)
        self.core.adopt(effect.migration_id, state, effect.num_blocks)
        index = state.num_output_tokens
        self._tell(lambda: self.listener.on_adopted(ask.frontend_id, ask.request_id, index))

    def forget_migration(self, migration_id: MigrationId) -> None:
        """Drop what is remembered of a migration that has ended on this side."""
        self.leaving.pop(migration_id, None)
        self.prepared.pop(migration_id, None)

    # -------------------------------------------------------------------------------- copies

    def request(self, request_id: RequestId) -> EmulatedRequest | None:
        """The request, if it is here."""
        return next((r for r in self.core.requests() if r.request_id == request_id), None)

    def leaving_blocks(self, effect: CopyBlocks) -> list[list[Block]]:
        """The blocks that the stage copies, in each group."""
        leaving = self.leaving[effect.migration_id]
        columns = self._columns(effect)
        return self.cache.blocks_of(leaving.tables, columns, leaving.num_valid_tokens)

    def expected(self, effect: CopyBlocks) -> Incoming | None:
        """What this destination expects of the stage, or None when it has stopped listening."""
        prepared = self.prepared.get(effect.migration_id)
        return None if prepared is None else prepared.incoming.get(effect.stage)

    def receive(self, effect: CopyBlocks, contents: Sequence[Sequence[Content | None]]) -> None:
        """All of the stage has arrived."""
        incoming = self.prepared[effect.migration_id].incoming.pop(effect.stage)
        self.write(incoming, contents)
        self._tell_of_transfer(effect.migration_id, StageReceived(effect.stage))

    def write(self, incoming: Incoming, contents: Sequence[Sequence[Content | None]]) -> None:
        """Write to the stage's blocks, of which some may be left over."""
        for blocks, arrived in zip(incoming.blocks, contents, strict=True):
            if len(arrived) > len(blocks):
                raise Violation(f"{self.name} gets more blocks than stage {incoming.stage} has")
            for block, content in zip(blocks, arrived, strict=False):
                block.content = content

    def fail_stage(self, migration_id: MigrationId, incoming: Incoming) -> None:
        """The connection of the stage is broken; a stage that is no longer expected is ignored."""
        prepared = self.prepared.get(migration_id)
        if prepared is not None and prepared.incoming.get(incoming.stage) is incoming:
            del prepared.incoming[incoming.stage]
            self._tell_of_transfer(migration_id, StageFailed(incoming.stage))

    def _await_stage(self, migration_id: MigrationId, incoming: Incoming) -> None:
        """Give the stage up when it gets no bytes for too long."""
        now_s = self._timeline.now_s
        wait_s = (
            COPY_TIMEOUT_S if incoming.num_copying else incoming.since_s + COPY_TIMEOUT_S - now_s
        )
        if wait_s <= 0:
            self.fail_stage(migration_id, incoming)
            return
        self._timeline.push(
            wait_s, self._process, "", lambda: self._await_stage(migration_id, incoming)
        )

    def _tell_of_transfer(self, migration_id: MigrationId, event: CopyEvent) -> None:
        # It comes from the data plane, and overtakes reports of the step thread.
        self._timeline.push(
            self._rng.random() * 0.002,
            self._process,
            event,
            lambda: self.listener.on_transfer(migration_id, event),
        )

    # --------------------------------------------------------------------------------- steps

    def stall(self, is_stalled: bool) -> None:
        """Stop stepping; or continue."""
        self.is_stalled = is_stalled
        if not is_stalled and not self._is_awake:
            self._wake_in(0.0)

    def _do(self, command: Command) -> None:
        self._commands.append(command)
        if not self._is_awake and not self._is_between_steps:
            self._wake_in(0.0)

    def _wake_in(self, delay_s: float) -> None:
        self._is_awake = True
        self._timeline.push(delay_s, self._process, "between steps", self._between_steps)

    def _between_steps(self) -> None:
        self._is_awake = False
        if self.is_stalled:
            return
        self._is_between_steps = True
        if self.core.is_stepping:
            self._deliver(self.core.end_step())
        while self._commands:
            self._commands.popleft()()
        step = self.core.begin_step()
        if self.core.is_stepping:
            self._wake_in(step.duration_s * self._slowness())
        recorder = self.cache.pool.recorder
        if recorder is not None and (changes := recorder.take()) is not None:
            self._tell(partial(self.listener.on_cache, changes))
        view = self._view()
        if view != self._last_view:
            self._last_view = view
            self._tell(lambda: self.listener.on_view(view))
        self._is_between_steps = False

    def _view(self) -> InstanceView:
        view = self.core.view(InstanceId(self._process.name), is_terminating=self.is_terminating)
        immovable = {
            request_id for request_id, each in self.streams.items() if each.ask.is_immovable
        }
        return shown_as_immovable(view, immovable) if immovable else view

    def _slowness(self) -> float:
        """The factor by which a step takes longer; a few take very long, and so does all that waits
        for their end."""
        factor = self._rng.uniform(0.8, 1.3)
        is_long = self._rng.random() < self.long_step_share
        return factor * LONG_STEP_FACTOR if is_long else factor

    def _deliver(self, tokens: tuple[Token, ...]) -> None:
        batches: dict[FrontendId, tuple[list[TokenSpan], list[bytes]]] = {}
        for token in tokens:
            stream = self.streams[token.request_id]
            spans, payloads = batches.setdefault(stream.ask.frontend_id, ([], []))
            spans.append(TokenSpan(token.request_id, token.index, 1, token.is_last))
            payloads.append(encode(self._answer(stream)))
            if token.is_last:
                del self.streams[token.request_id]
        for frontend_id, (spans, payloads) in batches.items():
            self._tell(partial(self.listener.on_outputs, frontend_id, tuple(spans), payloads))

    def _answer(self, stream: Stream) -> Answer:
        salt = stream.ask.salt
        if salt is None:
            # Not seeded: another engine, or this one at another time, samples differently.
            salt = self._rng.getrandbits(32)
        digest = stream.digests[-1]
        token_id = WRONG if stream.is_wrong else next_token(digest, salt)
        stream.digests.append(extend(digest, token_id))
        return Answer(0, [Output(stream.ask.request_id, [token_id], [digest])])

    def _tell(self, action: Command) -> None:
        now_s = self._timeline.now_s
        self.all_told_s = max(self.all_told_s, now_s + self._rng.random() * self.tell_s)
        self._timeline.push(self.all_told_s - now_s, self._process, "engine", action)
