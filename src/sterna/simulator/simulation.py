"""The simulated cluster: production scheduling over emulated engines, in virtual time.

Events happen one after the other: steps end, messages and copies arrive, requests arrive, the
global scheduler has its rounds. The `GlobalScheduler`, `Llumlet`s and policies of production decide
on them; this module carries their effects out in virtual time.

There is no randomness, and nothing depends on the order of sets or on the clock: the same trace and
configuration give the same records, bit for bit, in every process.
"""

import math
import time
from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np

from sterna.config import LlumletConfig
from sterna.errors import ConfigurationError
from sterna.messages.actors import DispatchRequest
from sterna.metrics.records import ClusterRecord, Records
from sterna.migration.messages import CopyBlocks, Ended, Message
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.scheduler.global_scheduler import Dispatch, Effect, GlobalScheduler, SetDestination
from sterna.scheduler.prefix_copies import CopyPrefix
from sterna.simulator.config import Report, SimulationConfig
from sterna.simulator.engines import Engines, index_of, request_id_of
from sterna.simulator.event_queue import EventQueue, Rank
from sterna.simulator.fast_tables import VICTIMS, looks_at_requests
from sterna.simulator.links import Copy, Links
from sterna.simulator.plain import PlainEngines
from sterna.simulator.recorder import Recorder
from sterna.simulator.simulated_instance import SimulatedInstance
from sterna.types import FrontendId, InstanceId, MigrationId, Priority, RequestId, whose_prefix
from sterna.workload.trace import Trace

FRONTEND = FrontendId(0)


def simulate(trace: Trace, config: SimulationConfig) -> tuple[Records, ClusterRecord]:
    """Run the trace to its end.

    Raises:
        ConfigurationError: a request of the trace can never be served by such an instance.
    """
    begin_s = time.perf_counter()
    simulation = Simulation(trace, config)
    simulation.run()
    return simulation.result(time.perf_counter() - begin_s)


class Simulation:
    """One run.

    Args:
        explains: whether the scheduler's effects have reasons, which nothing else depends on.
    """

    def __init__(self, trace: Trace, config: SimulationConfig, *, explains: bool = False) -> None:
        _require_servable(trace, config)
        config = replace(config, policy=config.policy.with_fresh_state())
        self._trace = trace
        self._config = config
        self._engines = _engines(trace, config)
        self._scheduler = GlobalScheduler(
            config.policy,
            now_s=0.0,
            scaling=config.scaling,
            scaling_begins_s=config.scaling_begins_s,
            prefixes=_EnginePrefixes(self._engines),
            explains=explains,
        )
        self._llumlet_config = LlumletConfig(
            policy=config.policy,
            migration=config.migration,
            report_interval_s=None,
            retry_backoff_s=config.retry_backoff_s,
        )
        self._events = EventQueue()
        self._links = Links()
        self._instances: dict[InstanceId, SimulatedInstance] = {}
        self._rows: dict[int, SimulatedInstance] = {}
        self._num_started = 0
        self._arrivals_s: list[float] = trace.arrival_s.tolist()
        # Later turns of sessions come after answers: `_plan_notices`.
        self._coming = deque(range(len(trace)))
        self._sessions: list[str] = []
        if trace.turns is not None:
            self._coming = deque(np.flatnonzero(trace.turns.is_first).tolist())
            self._next_turns: list[int] = trace.turns.next().tolist()
            self._think_s: list[float] = trace.turns.think_s.tolist()
            self._sessions = [str(first) for first in trace.turns.first().tolist()]
        self._prompts_tokens: list[int] = trace.input_tokens.tolist()
        self._demands_tokens = _demands_tokens(trace, config)
        self._priorities: list[int] = trace.priority.tolist()
        # The ends of steps that are events even with engines that step by themselves.
        self._stops_s: dict[int, float] = {}
        self._tick_at_s: dict[InstanceId, float] = {}
        self._round_s = math.inf
        # The last time at which held requests were to be dispatched.
        self._offer_s = -math.inf
        self._recorder = Recorder()
        self._is_over = len(trace) == 0

    # --------------------------------------------------------------------------------- loop

    def run(self) -> None:
        """Run all events until every request has ended."""
        for _ in range(self._config.num_instances):
            self._launch(0.0, 0.0)
        self._plan_round(0.0)
        self._plan_sample(0.0)
        num_requests = len(self._trace)
        while not self._is_over:
            event = self._events.next
            arrival = (self._arrivals_s[self._coming[0]], Rank.ARRIVAL) if self._coming else None
            if self._plan_notices(event, arrival):
                continue
            if arrival is not None and (event is None or arrival < event):
                self._ask(self._coming.popleft(), arrival[0])
                continue
            if event is None:
                # No round and no sample will follow either.
                self._engines.advance(math.inf)
                break
            now_s, action = self._events.pop()
            action(now_s)
        assert self._engines.num_ended == num_requests, "every request ends"

    def result(self, wall_s: float) -> tuple[Records, ClusterRecord]:
        """The records of the run."""
        records = self._engines.records()
        simulated_s = float(records.end_s.max()) if len(records) else 0.0
        num_in_flight = sum(each.llumlet.num_outgoing for each in self._instances.values())
        recorded = self._recorder
        for instance in self._instances.values():
            recorded.set_migrating(instance.instance_id, False, simulated_s)
        return records, ClusterRecord(
            migrations_started=recorded.num_committed + recorded.num_aborted + num_in_flight,
            migrations_committed=recorded.num_committed,
            migrations_aborted=recorded.num_aborted,
            fragmentation_time_s=np.array(recorded.sample_s, np.float64),
            fragmentation_proportion=np.array(recorded.proportions, np.float64),
            instances_time_s=np.array(recorded.instances_s, np.float64),
            instances_num=np.array(recorded.num_instances, np.int64),
            migrating_instance_s=recorded.migrating_s,
            downtime_s=np.array(recorded.downtimes_s, np.float64),
            simulated_s=simulated_s,
            wall_s=wall_s,
            num_steps=self._engines.num_steps,
            free_tokens=np.array(recorded.free_tokens, np.int64),
            total_tokens=np.array(recorded.total_tokens, np.int64),
            blocked_demands_tokens=tuple(recorded.blocked_demands_tokens),
            room_tokens=np.array(recorded.room_tokens, np.int64),
            imbalance=np.array(recorded.imbalance, np.float64),
            prefixes_copied=recorded.num_prefixes_copied,
        )

    # ----------------------------------------------------------------------- dispatch, rounds

    def _plan_notices(
        self, event: tuple[float, int] | None, arrival: tuple[float, int] | None
    ) -> bool:
        """Plan what follows from steps that end before anything else happens: turns after answers,
        and the dispatch of held requests; returns whether there is anything."""
        if self._trace.turns is None and self._scheduler.num_held == 0:
            return False
        until_s = min(math.inf if each is None else each[0] for each in (event, arrival))
        ended, room_s = self._engines.notices(
            until_s, self._scheduler.smallest_held_tokens, self._scheduler.growth_steps
        )
        for index, end_s in ended:
            turn = self._next_turns[index]
            action = partial(self._begin_turn, turn)
            self._events.push(end_s + self._think_s[turn], Rank.ARRIVAL, action)
        if room_s is not None:
            self._plan_offer(room_s)
        return bool(ended) or room_s is not None

    def _plan_offer(self, now_s: float) -> None:
        """Have the scheduler look for instances for held requests."""
        if self._offer_s != now_s:
            self._offer_s = now_s
            self._events.push(now_s, Rank.ROOM, self._report_loads)

    def _begin_turn(self, index: int, now_s: float) -> None:
        self._arrivals_s[index] = now_s
        self._engines.set_arrival(index, now_s)
        self._ask(index, now_s)

    def _ask(self, index: int, now_s: float) -> None:
        """Make the scheduler choose an instance for the request."""
        self._report_loads(now_s)
        priority = Priority(self._priorities[index])
        request = DispatchRequest(
            frontend_id=FRONTEND,
            request_id=request_id_of(index),
            demand_tokens=self._demands_tokens[index],
            arrival_s=self._arrivals_s[index],
            scheduling_priority=priority,
            execution_priority=priority,
            session=self._sessions[index] if self._sessions else "",
            prompt_tokens=self._prompts_tokens[index],
            block_hashes=self._engines.prompt_hashes(index),
        )
        self._carry_out(self._scheduler.on_request(request, now_s), now_s)
        self._plan_wait(now_s)

    def _round(self, now_s: float) -> None:
        if now_s != self._round_s:
            # Another one has been planned for an earlier time, and the next one behind it.
            return
        self._round_s = math.inf
        self._report_loads(now_s)
        if self._note_end():
            return
        self._carry_out(self._scheduler.on_tick(now_s), now_s)
        self._plan_round(now_s)

    def _note_end(self) -> bool:
        """Whether all requests have ended, now that every engine has reached this moment.

        Called by rounds and samples only: their times are the same with plain and compiled engines.
        """
        self._is_over = self._engines.num_ended == len(self._trace)
        return self._is_over

    def _plan_round(self, now_s: float) -> None:
        deadline_s = self._scheduler.next_deadline_s
        if deadline_s is not None and deadline_s < self._round_s:
            self._round_s = max(now_s, deadline_s)
            self._events.push(self._round_s, Rank.ROUND, self._round)

    def _plan_wait(self, now_s: float) -> None:
        """Plan when a request that has just been held no longer waits."""
        if self._scheduler.num_held > 0:
            self._plan_round(now_s)

    def _report_loads(self, now_s: float) -> None:
        """Report the loads to the scheduler that it does not know yet."""
        loads = self._engines.changed_loads(now_s)
        if effects := self._scheduler.on_loads(loads, now_s):
            self._carry_out(effects, now_s)
        self._plan_wait(now_s)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Dispatch():
                    self._dispatch(effect, now_s)
                case SetDestination(source, destination):
                    # The source may end at the same time as its destination.
                    if source in self._instances:
                        self._instances[source].on_destination(destination, now_s)
                case CopyPrefix(request, source, destination, first_token):
                    request_id = request.request_id
                    if source in self._instances:
                        instance = self._instances[source]
                        instance.on_copy_prefix(request_id, destination, first_token, now_s)
                    else:
                        self.on_prefix_done(request_id, now_s)
                    self._plan_round(now_s)
                case ScaleUp(num_instances):
                    for _ in range(num_instances):
                        self._launch(now_s, self._config.start_delay_s)
                case Terminate(instance_id):
                    self._terminate(self._instances[instance_id], now_s)

    def _dispatch(self, dispatch: Dispatch, now_s: float) -> None:
        delay_s = self._config.dispatch_delay_s
        if delay_s == 0:
            self._deliver(dispatch, now_s)
        else:
            self._events.push(now_s + delay_s, Rank.MESSAGE, partial(self._deliver, dispatch))

    def _deliver(self, dispatch: Dispatch, now_s: float) -> None:
        index = index_of(dispatch.request_id)
        instance = self._instances.get(dispatch.instance_id)
        if instance is None:
            # It was emptied and ended while the request was on its way.
            self._ask(index, now_s)
            return
        instance.on_request_admitted(dispatch.request_id, dispatch.dispatch_number)
        self._engines.add(instance.row, index, dispatch.dispatch_number, now_s)
        self._step_if_idle(instance, now_s)

    # -------------------------------------------------------------------------------- steps

    def _step_if_idle(self, instance: SimulatedInstance, now_s: float) -> None:
        if self._engines.step_end_s(instance.row, now_s) is None:
            self._between_steps(instance, now_s)

    def _end_step(self, instance: SimulatedInstance, now_s: float) -> None:
        self._engines.end_step(instance.row, now_s)
        self._between_steps(instance, now_s)

    def _between_steps(self, instance: SimulatedInstance, now_s: float) -> None:
        instance.run_commands(now_s)
        end_s = self._engines.begin_step(instance.row, now_s)
        if end_s is None:
            self._end_if_empty(instance, now_s)
        elif not self._engines.steps_alone:
            self._plan_step_end(instance, end_s)
        elif instance.is_terminating:
            self._stop_after_step(instance, end_s)
        held_tokens = self._scheduler.smallest_held_tokens
        if held_tokens is None or instance.instance_id not in self._instances:
            return
        if self._engines.has_room(instance.row, held_tokens, self._scheduler.growth_steps):
            self._plan_offer(now_s)

    def _stop_after_step(self, instance: SimulatedInstance, end_s: float) -> None:
        """Make the end of the step under way an event, with engines that step by themselves."""
        if self._stops_s.get(instance.row) != end_s:
            self._stops_s[instance.row] = end_s
            self._engines.hold(instance.row)
            self._plan_step_end(instance, end_s)

    def _plan_step_end(self, instance: SimulatedInstance, end_s: float) -> None:
        action = partial(self._end_step, instance)
        self._events.push(end_s, Rank.STEP_END, action, instance.row)

    # --------------------------------------------------------------------------- migrations

    def send(self, sender: InstanceId, peer: InstanceId, message: Message, now_s: float) -> None:
        """Deliver the message to the peer's llumlet, later."""
        action = partial(self._receive, sender, peer, message)
        self._events.push(now_s + self._config.message_delay_s, Rank.MESSAGE, action)

    def _receive(
        self, sender: InstanceId, peer: InstanceId, message: Message, now_s: float
    ) -> None:
        instance = self._instances.get(peer)
        if instance is not None:
            instance.on_message(sender, message, now_s)

    def begin_copy(self, source: InstanceId, effect: CopyBlocks, now_s: float) -> None:
        """Copy blocks to the migration's destination."""
        (destination,) = effect.receivers
        moved = self._links.begin(
            effect.migration_id,
            source,
            InstanceId(destination),
            effect.stage,
            self._config.copy_time.stage_duration_s(effect.num_blocks),
            now_s,
        )
        self._plan_copies(moved)

    def stop_copy(self, migration_id: MigrationId, now_s: float) -> None:
        """Drop the migration's copy, if there is one."""
        self._plan_copies(self._links.end(migration_id, now_s))

    def _plan_copies(self, copies: list[Copy]) -> None:
        for copy in copies:
            action = partial(self._end_copy, copy, copy.end_s)
            self._events.push(copy.end_s, Rank.MESSAGE, action)

    def _end_copy(self, copy: Copy, planned_s: float, now_s: float) -> None:
        # A copy that was given up, or whose end has changed, leaves an old event in the queue.
        if self._links.copy_of(copy.migration_id) is not copy or copy.end_s != planned_s:
            return
        self._plan_copies(self._links.end(copy.migration_id, now_s))
        instance = self._instances.get(copy.destination)
        if instance is not None:
            instance.on_stage_copied(copy.migration_id, copy.stage, now_s)

    def on_drained(self, migration_id: MigrationId, now_s: float) -> None:
        """A running request has left its batch; its downtime begins."""
        self._recorder.drained_s[migration_id] = now_s

    def on_adopted(self, migration_id: MigrationId, now_s: float) -> None:
        """The request runs or queues on its destination from the next step on."""
        drained_s = self._recorder.drained_s.pop(migration_id, None)
        if drained_s is not None:
            self._recorder.downtimes_s.append(now_s - drained_s)

    def on_prefix_done(self, request_id: RequestId, now_s: float) -> None:
        """The request's prefix has been copied, or will not be."""
        # Not at once: the caller is still carrying out effects.
        action = partial(self._end_wait, request_id)
        self._events.push(now_s + self._config.message_delay_s, Rank.MESSAGE, action)

    def _end_wait(self, request_id: RequestId, now_s: float) -> None:
        self._carry_out(self._scheduler.on_prefix_done(request_id, now_s), now_s)

    def on_ended(self, ended: Ended) -> None:
        """A migration is over for one of its sides."""
        if not ended.is_outgoing:
            return
        if whose_prefix(ended.request_id) is not None:
            self._recorder.num_prefixes_copied += ended.aborted is None
            return
        if ended.aborted is None:
            self._recorder.num_committed += 1
        else:
            self._recorder.num_aborted += 1
            self._recorder.drained_s.pop(ended.migration_id, None)

    def on_activity(self, instance: SimulatedInstance, now_s: float) -> None:
        """The instance has handled an event and carried out the effects."""
        num_migrating = instance.llumlet.num_outgoing, instance.llumlet.num_incoming
        if num_migrating != instance.num_migrating:
            instance.num_migrating = num_migrating
            self._engines.set_migrating(instance.row, *num_migrating)
            self._recorder.set_migrating(instance.instance_id, sum(num_migrating) > 0, now_s)
        if (instance.has_commands or instance.is_terminating) and not instance.is_between_steps:
            self._plan_commands(instance, now_s)
        self._plan_tick(instance)

    def _plan_commands(self, instance: SimulatedInstance, now_s: float) -> None:
        if self._stops_s.get(instance.row, -math.inf) > now_s:
            return  # They run when the step under way ends.
        end_s = self._engines.step_end_s(instance.row, now_s)
        if end_s is None:
            # Not at once: the caller is still carrying out effects.
            action = partial(self._settle, instance)
            self._events.push(now_s, Rank.STEP_END, action, instance.row)
        elif self._engines.steps_alone:
            self._stop_after_step(instance, end_s)

    def _settle(self, instance: SimulatedInstance, now_s: float) -> None:
        """Run the commands of an engine that has nothing to compute."""
        if instance.instance_id in self._instances:
            self._step_if_idle(instance, now_s)

    def _plan_tick(self, instance: SimulatedInstance) -> None:
        deadline_s = instance.llumlet.next_deadline_s
        planned_s = self._tick_at_s.get(instance.instance_id)
        if deadline_s is not None and (planned_s is None or deadline_s < planned_s):
            self._tick_at_s[instance.instance_id] = deadline_s
            action = partial(self._tick, instance, deadline_s)
            self._events.push(deadline_s, Rank.MESSAGE, action)

    def _tick(self, instance: SimulatedInstance, planned_s: float, now_s: float) -> None:
        if self._tick_at_s.get(instance.instance_id) != planned_s:
            return
        del self._tick_at_s[instance.instance_id]
        deadline_s = instance.llumlet.next_deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            instance.on_tick(now_s)
        else:
            self._plan_tick(instance)

    # ------------------------------------------------------------------------------ scaling

    def _launch(self, now_s: float, delay_s: float) -> None:
        instance_id = InstanceId(f"i{self._num_started:05d}")
        self._num_started += 1
        row = next(row for row in range(len(self._rows) + 1) if row not in self._rows)
        instance = SimulatedInstance(instance_id, row, self._llumlet_config, self._engines, self)
        self._instances[instance_id] = instance
        self._rows[row] = instance
        self._recorder.set_num_instances(now_s, len(self._instances))
        self._carry_out(self._scheduler.on_instance_joined(instance_id, now_s), now_s)
        if delay_s == 0:
            self._engines.start(row, instance_id, instance.llumlet.policy)
        else:
            action = partial(self._ready, instance)
            self._events.push(now_s + delay_s, Rank.MESSAGE, action)

    def _ready(self, instance: SimulatedInstance, now_s: float) -> None:
        self._engines.start(instance.row, instance.instance_id, instance.llumlet.policy)

    def _terminate(self, instance: SimulatedInstance, now_s: float) -> None:
        instance.set_terminating(now_s)
        self._plan_commands(instance, now_s)

    def _end_if_empty(self, instance: SimulatedInstance, now_s: float) -> None:
        """End the instance if it was emptied and no peer needs an answer from it."""
        if not instance.is_terminating:
            return
        if instance.llumlet.has_open_migrations or not self._engines.is_empty(instance.row):
            return
        del self._instances[instance.instance_id]
        del self._rows[instance.row]
        self._engines.stop(instance.row)
        self._stops_s.pop(instance.row, None)
        self._tick_at_s.pop(instance.instance_id, None)
        self._recorder.set_num_instances(now_s, len(self._instances))
        gone = instance.instance_id
        effects = self._scheduler.on_instance_left(gone, now_s)
        # Not at once: the others learn of it after all steps that end at this time.
        self._events.push(now_s, Rank.MESSAGE, partial(self._notify_gone, gone, effects))

    def _notify_gone(self, gone: InstanceId, effects: list[Effect], now_s: float) -> None:
        """Notify the other instances that one has ended."""
        self._carry_out(effects, now_s)
        self._plan_wait(now_s)
        for other in tuple(self._instances.values()):
            other.on_peer_gone(gone, now_s)

    # ------------------------------------------------------------------------------ samples

    def _plan_sample(self, now_s: float) -> None:
        if self._config.fragmentation_interval_s is not None:
            next_s = now_s + self._config.fragmentation_interval_s
            self._events.push(next_s, Rank.SAMPLE, self._sample)

    def _sample(self, now_s: float) -> None:
        self._engines.advance(now_s)
        if self._note_end():
            return
        held_tokens = self._scheduler.head_demand_tokens
        self._recorder.sample(now_s, self._engines.memory(), held_tokens)
        self._plan_sample(now_s)


class _EnginePrefixes:
    """The scheduler's knowledge of prefix caches: what the engines would answer."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def cached_tokens(self, request: DispatchRequest) -> dict[InstanceId, int]:
        return self._engines.coming_tokens(index_of(request.request_id))

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None:
        """The engines know what comes to them."""

    def can_copy(self, source: InstanceId, destination: InstanceId) -> bool:
        """Emulated engines have one KV cache group, which keeps all blocks."""
        return True

    def on_cancel(self, request_id: RequestId) -> None:
        """No request is cancelled here."""

    def on_frontend_left(self, frontend_id: FrontendId) -> None:
        """No front end leaves here."""


def _engines(trace: Trace, config: SimulationConfig) -> Engines:
    """The compiled engines, or the plain ones, also for rules that only these have, and for reports
    of a state of requests that has passed."""
    has_compiled_rules = not config.policy.migrates or config.policy.victim in VICTIMS
    shows_past = config.report is not Report.LIVE and looks_at_requests(config.policy)
    if not (config.is_fast and has_compiled_rules) or shows_past:
        return PlainEngines(trace, config)
    # numba takes a second to import, which plain runs do not need.
    from sterna.simulator.fast import FastEngines

    return FastEngines(trace, config)


def _demands_tokens(trace: Trace, config: SimulationConfig) -> list[int]:
    block_size = config.engine.block_size
    demands: list[int] = (-(-trace.input_tokens // block_size) * block_size).tolist()
    return demands


def _require_servable(trace: Trace, config: SimulationConfig) -> None:
    """Require that every request fits alone: another one would queue or be preempted forever."""
    total_tokens = trace.input_tokens + trace.output_tokens
    is_servable = total_tokens <= config.engine.total_tokens
    if not is_servable.all():
        row = int(np.argmin(is_servable))
        raise ConfigurationError(
            f"trace {trace.name}: row {row} needs {int(total_tokens[row])} tokens of memory, "
            f"an instance has {config.engine.total_tokens}"
        )
