"""A few instances with real llumlets and tiny engines, over a network that keeps no promise.

Nothing happens by itself: every delivery, loss, repetition, engine operation, copied block and
second is a move that somebody chooses, so that any interleaving can be played. What must hold
after every move is in `check`; what must hold once the network has healed is in `check_healed`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sterna.config import LlumletConfig, MigrationConfig, PolicyConfig
from sterna.instance.llumlet import ForwardAbort, Llumlet, LlumletEffect, Report
from sterna.migration.effect_queue import EffectQueue
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    CopyBlocks,
    CopyFailed,
    Drain,
    Effect,
    Ended,
    Event,
    FreeReservation,
    Inspect,
    Message,
    Mode,
    Outcome,
    Reason,
    Release,
    ReservationFreed,
    ReserveBlocks,
    Resume,
    Send,
    StageFailed,
    StageReceived,
    StopCopying,
)
from sterna.types import InstanceId, MigrationId, RequestId
from tests.migration.engine import Engine, Listening, Request, Where

TRANSFER_TIMEOUT_S = 5.0
STEPPABLE = (Where.RUNNING, Where.QUEUING)

CONFIG = LlumletConfig(
    policy=PolicyConfig(name="test", num_concurrent_migrations=2),
    migration=MigrationConfig(
        last_stage_max_blocks=1, max_stages=4, lease_s=10.0, query_interval_s=1.0
    ),
)


@dataclass
class Packet:
    sender: InstanceId
    receiver: InstanceId
    message: Message


@dataclass
class Transfer:
    """A stage on its way; the blocks are read one by one, when they are sent."""

    source: InstanceId
    destination: InstanceId
    migration_id: MigrationId
    stage: int
    block_ids: Sequence[int]
    num_sent: int = 0
    listening: Listening | None = None


@dataclass
class Node:
    """One instance: what it runs, and what is under way inside it."""

    llumlet: Llumlet
    engine: Engine
    is_alive: bool = True
    is_death_confirmed: bool = False
    effects: EffectQueue = field(default_factory=EffectQueue)
    commands: deque[Effect] = field(default_factory=deque)
    outcomes: deque[tuple[MigrationId, Event]] = field(default_factory=deque)


class World:
    """Instances, network, clients, and a supervisor that confirms deaths."""

    llumlet_type: type[Llumlet] = Llumlet

    def __init__(self, names: str = "ABC", num_blocks: int = 12, max_batch: int = 4) -> None:
        self.now_s = 0.0
        self.nodes: dict[InstanceId, Node] = {}
        for each in names:
            instance_id = InstanceId(each)
            llumlet = self.llumlet_type(instance_id, CONFIG)
            self.nodes[instance_id] = Node(llumlet, Engine(instance_id, num_blocks, max_batch))
        self.network: list[Packet] = []
        self.forwarded: list[ForwardAbort] = []
        self.transfers: list[Transfer] = []
        self.num_requests = 0
        self.home: dict[RequestId, InstanceId] = {}
        """Where the request's front end believes it: whence its last token came."""
        self.ended: set[RequestId] = set()
        self.aborted: set[RequestId] = set()
        self.may_be_lost: set[RequestId] = set()
        """Requests that died with an instance while no other one could step them."""
        self.has_death = False
        self.log: list[str] = []
        self.endings: list[tuple[InstanceId, Ended]] = []

    # ----------------------------------------------------------------------- what users do

    def add_request(self, instance_id: InstanceId, num_tokens: int, num_more: int) -> RequestId:
        self.num_requests += 1
        request_id = RequestId(f"r{self.num_requests}")
        node = self.nodes[instance_id]
        node.llumlet.on_request_arrived(request_id)
        node.llumlet.on_request_admitted(self.num_requests)
        node.engine.add(Request(request_id, num_tokens, num_tokens + num_more))
        node.engine.admit()
        self.home[request_id] = instance_id
        self.show_view(node)
        return request_id

    def order(self, request_id: RequestId, source: InstanceId, to: InstanceId, mode: Mode) -> None:
        outcome = self.nodes[source].llumlet.on_order(request_id, to, mode, self.now_s)
        if not isinstance(outcome, Reason):
            self.carry_out(self.nodes[source], outcome[1])

    def set_destination(self, instance_id: InstanceId, destination: InstanceId | None) -> None:
        node = self.nodes[instance_id]
        self.carry_out(node, node.llumlet.on_destination(destination, self.now_s))

    def abort_by_client(self, request_id: RequestId) -> None:
        node = self.nodes[self.home[request_id]]
        self.aborted.add(request_id)
        if node.is_alive:
            self.carry_out(node, node.llumlet.on_client_abort(request_id, self.now_s))

    # --------------------------------------------------------------------- what engines do

    def step(self, node: Node) -> None:
        running = [r for r in node.engine.requests.values() if r.where is Where.RUNNING]
        for request in running:
            self.home[request.request_id] = node.engine.instance_id
        for request in node.engine.step():
            self.ended.add(request.request_id)
        node.engine.admit()
        self.show_view(node)

    def preempt(self, node: Node, request_id: RequestId, *, is_hinted: bool) -> None:
        node.engine.preempt(node.engine.requests[request_id])
        if is_hinted:
            effects = node.llumlet.on_request_ended(
                request_id, Reason.REQUEST_PREEMPTED, self.now_s
            )
            self.carry_out(node, effects)

    def show_view(self, node: Node) -> None:
        self.carry_out(node, node.llumlet.on_view(node.engine.view(), self.now_s))

    def run_command(self, node: Node) -> None:
        """The engine carries out the oldest effect that is due."""
        effect = node.commands.popleft()
        engine = node.engine
        outcome: Event | None = None
        match effect:
            case Inspect():
                outcome = engine.inspect(effect.request_id)
            case Drain():
                outcome = engine.drain(effect)
            case Resume():
                engine.resume(effect.request_id)
            case Release():
                engine.free_drained(effect.request_id)
            case AbortDrained():
                assert effect.request_id in self.aborted, "ended without its client's wish"
                engine.free_drained(effect.request_id)
                self.ended.add(effect.request_id)
            case AbortRequest(request_id):
                assert request_id in self.aborted, "ended without its client's wish"
                request = engine.requests.get(request_id)
                if request is not None:
                    assert request.where is not Where.DRAINED, "a drained request is not ended so"
                    engine.remove(request)
                    self.ended.add(request_id)
                return
            case ReserveBlocks():
                outcome = engine.reserve(effect, self.now_s)
            case FreeReservation():
                engine.free_reservation(effect.migration_id)
                outcome = ReservationFreed()
            case Adopt():
                outcome = engine.adopt(effect)
            case CopyBlocks():
                outcome = self.begin_copy(engine, effect)
            case StopCopying():
                self.transfers = [
                    t
                    for t in self.transfers
                    if (t.source, t.migration_id) != (engine.instance_id, effect.migration_id)
                ]
            case _:
                raise AssertionError(f"{effect} is not for the engine")
        if outcome is not None:
            node.outcomes.append((effect.migration_id, outcome))

    def begin_copy(self, engine: Engine, effect: CopyBlocks) -> CopyFailed | None:
        request = engine.requests.get(effect.request_id)
        end = effect.first_block + effect.num_blocks
        if request is None or len(request.blocks) < end:
            return CopyFailed(effect.stage)
        (destination,) = effect.receivers
        transfer = Transfer(
            engine.instance_id,
            InstanceId(destination),
            effect.migration_id,
            effect.stage,
            request.blocks[effect.first_block : end],
        )
        self.transfers.append(transfer)
        return None

    def deliver_outcome(self, node: Node, index: int) -> None:
        migration_id, event = node.outcomes[index]
        del node.outcomes[index]
        self.carry_out(node, node.llumlet.on_outcome(migration_id, event, self.now_s))
        if isinstance(event, Outcome):
            for effect in node.effects.done(migration_id):
                self.begin(node, effect)

    # ------------------------------------------------------------------- what networks do

    def deliver(self, packet: Packet) -> None:
        node = self.nodes[packet.receiver]
        if node.is_alive:
            effects = node.llumlet.on_message(packet.sender, packet.message, self.now_s)
            self.carry_out(node, effects)

    def deliver_forwarded(self) -> None:
        forwarded = self.forwarded.pop(0)
        node = self.nodes[forwarded.instance_id]
        if node.is_alive:
            effects = node.llumlet.on_client_abort(forwarded.request_id, self.now_s)
            self.carry_out(node, effects)

    def copy_one_block(self, transfer: Transfer) -> None:
        """Gather, send and scatter the transfer's next block."""
        source, destination = self.nodes[transfer.source], self.nodes[transfer.destination]
        key = (transfer.migration_id, transfer.stage)
        listening = destination.engine.listening.get(key)
        # A receiver takes a transfer from its first block on, or not at all.
        is_expected = transfer.num_sent == 0 or transfer.listening is listening
        if not destination.is_alive or listening is None or not is_expected:
            self.fail_transfer(transfer)
            return
        transfer.listening = listening
        block_id = listening.block_ids[transfer.num_sent]
        content = source.engine.memory[transfer.block_ids[transfer.num_sent]]
        destination.engine.memory[block_id] = content
        transfer.num_sent += 1
        if transfer.num_sent == len(transfer.block_ids):
            self.transfers.remove(transfer)
            del destination.engine.listening[key]
            destination.outcomes.append((transfer.migration_id, StageReceived(transfer.stage)))

    def fail_transfer(self, transfer: Transfer) -> None:
        """The source's side of the link breaks; the destination's notices by its timeout."""
        self.transfers.remove(transfer)
        source = self.nodes[transfer.source]
        if source.is_alive:
            source.outcomes.append((transfer.migration_id, CopyFailed(transfer.stage)))

    def fail_listening(self, node: Node, key: tuple[MigrationId, int]) -> None:
        del node.engine.listening[key]
        node.outcomes.append((key[0], StageFailed(key[1])))
        self.transfers = [t for t in self.transfers if (t.migration_id, t.stage) != key]

    # ------------------------------------------------------------------------ time and death

    def advance(self, to_s: float) -> None:
        self.now_s = max(self.now_s, to_s)
        for node in self.alive():
            deadline_s = node.llumlet.next_deadline_s
            if deadline_s is not None and deadline_s <= self.now_s:
                self.carry_out(node, node.llumlet.on_tick(self.now_s))
            for key, listening in list(node.engine.listening.items()):
                is_silent = not any((t.migration_id, t.stage) == key for t in self.transfers)
                if is_silent and self.now_s >= listening.since_s + TRANSFER_TIMEOUT_S:
                    self.fail_listening(node, key)

    def kill(self, instance_id: InstanceId) -> None:
        node = self.nodes[instance_id]
        node.is_alive = False
        self.has_death = True
        self.may_be_lost |= {r for r in node.engine.requests if not self.owners(r)}
        self.transfers = [t for t in self.transfers if t.source != instance_id]

    def confirm_death(self, instance_id: InstanceId) -> None:
        self.nodes[instance_id].is_death_confirmed = True
        for node in self.alive():
            self.carry_out(node, node.llumlet.on_peer_dead(instance_id, self.now_s))

    def named(self, name: str) -> InstanceId:
        return InstanceId(name)

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_alive]

    # ------------------------------------------------------------------------- the interpreter

    def carry_out(self, node: Node, effects: Sequence[LlumletEffect]) -> None:
        for effect in effects:
            self.carry_out_one(node, effect)

    def carry_out_one(self, node: Node, effect: LlumletEffect) -> None:
        match effect:
            case Report():
                pass
            case ForwardAbort():
                self.forwarded.append(effect)
            case _:
                if node.effects.push(effect):
                    self.begin(node, effect)

    def begin(self, node: Node, effect: Effect) -> None:
        match effect:
            case Send(peer, message):
                self.network.append(Packet(node.engine.instance_id, peer, message))
            case Ended():
                self.endings.append((node.engine.instance_id, effect))
            case _:
                node.commands.append(effect)

    # -------------------------------------------------------------------------------- the rules

    def owners(self, request_id: RequestId) -> list[Node]:
        """Living instances that may step the request at this moment."""
        return [
            node
            for node in self.alive()
            if (request := node.engine.requests.get(request_id)) and request.where in STEPPABLE
        ]

    def check(self) -> None:
        """What holds at any time."""
        for request_id in self.home:
            owners = [node.engine.instance_id for node in self.owners(request_id)]
            assert len(owners) <= 1, f"{request_id} has two owners: {owners}"
            # A client's abort may still be on its way to the engine, and a source whose destination
            # died may repeat what only the dead one knew.
            if request_id in self.ended - self.aborted and not self.has_death:
                assert not owners, f"{request_id} has ended, and {owners} would step it"
        for node in self.nodes.values():
            engine = node.engine
            held = [b for request in engine.requests.values() for b in request.blocks]
            reserved = [b for each in engine.reservations.values() for b in each.blocks]
            blocks = sorted([*engine.free, *held, *reserved])
            assert blocks == list(range(engine.num_blocks)), "a block was lost or given twice"

    def heal(self) -> None:
        """Let everything arrive, confirm the dead, and let time pass until nothing is open."""
        for instance_id, node in self.nodes.items():
            if node.is_alive:
                self.set_destination(instance_id, None)
            elif not node.is_death_confirmed:
                self.confirm_death(instance_id)
        for _ in range(200):
            self.settle()
            if not any(node.llumlet.has_open_migrations for node in self.alive()):
                break
            deadlines = [node.llumlet.next_deadline_s for node in self.alive()]
            self.advance(min([self.now_s + 1.0, *(d for d in deadlines if d is not None)]))
        else:
            raise AssertionError("migrations stay open for ever")
        if self.has_death:
            # The front end learns from the tokens that a stream without a client goes on, since
            # an instance that should have forwarded the abort may have died.
            for request_id in self.aborted:
                for node in self.owners(request_id):
                    effects = node.llumlet.on_client_abort(request_id, self.now_s)
                    self.carry_out(node, effects)
        self.settle()
        self.check_healed()

    def settle(self) -> None:
        """Play all moves under way, in order, without a fault."""
        while True:
            for node in self.alive():
                while node.commands:
                    self.run_command(node)
                while node.outcomes:
                    self.deliver_outcome(node, 0)
            while self.transfers:
                self.copy_one_block(self.transfers[0])
            if self.network:
                self.deliver(self.network.pop(0))
            elif self.forwarded:
                self.deliver_forwarded()
            elif not any(node.commands or node.outcomes for node in self.alive()):
                return
            self.check()

    def check_healed(self) -> None:
        """What holds when no message is lost and time has passed."""
        self.check()
        for node in self.alive():
            engine = node.engine
            assert not engine.reservations, "a reservation outlived its migration"
            assert not engine.listening, "a receiver outlived its migration"
            drained = [r for r in engine.requests.values() if r.where is Where.DRAINED]
            assert not drained, f"nobody can step {drained}"
        for request_id in self.home:
            if request_id in self.aborted:
                assert not self.owners(request_id), f"{request_id} goes on without a client"
            elif request_id not in self.ended | self.may_be_lost:
                assert self.owners(request_id), f"nobody can step {request_id}"

    # ---------------------------------------------------------------------------------- moves

    def moves(self) -> list[Callable[[], None]]:
        """What can happen next without a fault."""
        moves: list[Callable[[], None]] = []
        for node in self.alive():
            if node.commands:
                moves.append(lambda node=node: self.run_command(node))
            for index in range(len(node.outcomes)):
                moves.append(lambda node=node, index=index: self.deliver_outcome(node, index))
        for packet in self.network:
            moves.append(lambda packet=packet: self.deliver(self.taken(packet)))
        if self.forwarded:
            moves.append(self.deliver_forwarded)
        for transfer in self.transfers:
            moves.append(lambda transfer=transfer: self.copy_one_block(transfer))
        return moves

    def taken(self, packet: Packet) -> Packet:
        self.network.remove(packet)
        return packet
