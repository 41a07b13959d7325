"""Operators' questions and orders: listing instances and requests, explaining, moving, draining,
starting."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from sterna.dashboard.decisions import newest
from sterna.errors import (
    FleetError,
    ImmovableError,
    UnansweredError,
    UnknownInstanceError,
    UnknownRequestError,
)
from sterna.frontend.peers import SCHEDULER, SUPERVISOR, Peers, Questions
from sterna.frontend.requests.histories import MAX_DECISIONS, MAX_ENDED
from sterna.frontend.requests.request_ids import meant
from sterna.messages.actors import (
    Absent,
    AdminReply,
    DescribeHistory,
    DrainInstance,
    DrainNode,
    InstanceMember,
    ListInstances,
    ListRecent,
    ListRequests,
    Membership,
    MigrateRequest,
    RestartInstances,
    StartInstances,
    WireMessage,
    frontend_name,
)
from sterna.migration.messages import Mode
from sterna.priority_classes import DEFAULT_CLASSES, PriorityClasses
from sterna.types import FrontendId, InstanceId, RequestId

Described = dict[str, Any]

DescribeHere = Callable[[DescribeHistory | ListRecent], Any]
"""Answers a question to a front end from its own histories."""


class Operators:
    """Asks the other actors of the cluster on behalf of operators.

    Args:
        describe_here: answers what other front ends are asked as well.
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        peers: Peers,
        timeout_s: float,
        describe_here: DescribeHere,
        classes: PriorityClasses = DEFAULT_CLASSES,
    ) -> None:
        self._frontend_id = frontend_id
        self._peers = peers
        self._describe_here = describe_here
        self._classes = classes
        self._questions: Questions[AdminReply] = Questions(timeout_s)
        self._scheduler: str | None = None
        self._supervisor: str | None = None
        self._frontends: frozenset[FrontendId] = frozenset()

    def on_reply(self, reply: AdminReply) -> None:
        """An answer has arrived."""
        self._questions.on_answer(reply.query_id, reply)

    def on_membership(self, membership: Membership) -> None:
        """Give up the questions to members that have gone."""
        self._questions.on_instances([each.instance_id for each in membership.instances])
        if membership.scheduler != self._scheduler:
            self._questions.on_gone(SCHEDULER)
        if membership.supervisor != self._supervisor:
            self._questions.on_gone(SUPERVISOR)
        self._scheduler, self._supervisor = membership.scheduler, membership.supervisor
        frontends = frozenset(each.frontend_id for each in membership.frontends)
        for gone in self._frontends - frontends:
            self._questions.on_gone(frontend_name(gone))
        self._frontends = frontends

    async def list_instances(self) -> list[Described]:
        """Return the instances with their loads, by the last reports to the scheduler.

        Raises:
            UnansweredError: there is no scheduler, or it does not answer.
        """

        def send(query_id: int) -> None:
            if not self._peers.send_to_scheduler(ListInstances(self._own_address, query_id)):
                raise UnansweredError("there is no scheduler at this moment; try again")

        instances: list[Described] = _decoded(await self._questions.ask(None, send))
        return instances

    def list_nodes(self) -> list[Described]:
        """Return the nodes that have instances or are drained, by their addresses."""
        membership = self._peers.membership
        instances: dict[str, list[InstanceId]] = {each: [] for each in membership.drained_nodes}
        members: tuple[InstanceMember | Absent, ...] = (
            *membership.instances,
            *membership.absent,
        )
        for each in members:
            if each.node is not None:
                instances.setdefault(each.node, []).append(each.instance_id)
        return [
            {"node": node, "drained": node in membership.drained_nodes, "instances": there}
            for node, there in sorted(instances.items())
        ]

    async def list_requests(self, timeout_s: float | None = None) -> list[Described]:
        """Return the live requests; those that wait at the scheduler are on no instance (None), and
        come last. Those on their way to an instance may be missing.

        Args:
            timeout_s: leave out those of actors that do not answer within this time.

        Raises:
            UnansweredError: without `timeout_s`: an instance or the scheduler died, or does not
                answer.
        """
        asked = [*map(self._list_requests_of, self._peers.instances), self._list_held()]
        if timeout_s is None:
            lists = await asyncio.gather(*asked)
        else:
            answers = await asyncio.gather(*(_in_time(each, timeout_s) for each in asked))
            lists = [each or [] for each in answers]
        # One that was dispatched meanwhile may be in two lists.
        found: dict[str, Described] = {}
        for request in (request for each in lists for request in each):
            found.setdefault(request["id"], request)
        return list(found.values())

    async def requests_by_instance(self, timeout_s: float) -> dict[InstanceId, list[Described]]:
        """Return the live requests of each instance that answers within this time."""
        instances = self._peers.instances
        asked = (_in_time(self._list_requests_of(each), timeout_s) for each in instances)
        found = zip(instances, await asyncio.gather(*asked), strict=True)
        return {instance_id: each for instance_id, each in found if each is not None}

    async def explain(self, name: str) -> list[Described]:
        """Return the histories of the requests that the name stands for, from all front ends.

        Raises:
            UnknownRequestError: no front end remembers such a request.
            UnansweredError: none of those that answer remembers one, and a front end does not
                answer.
        """
        answers, unanswered = await self._ask_frontends(
            lambda query_id: DescribeHistory(self._own_address, query_id, name)
        )
        found = [
            {**each, "frontend": frontend_id}
            for frontend_id, histories in answers.items()
            for each in histories
        ]
        if not found and unanswered:
            raise unanswered[0]
        if not found:
            raise UnknownRequestError(
                f"no front end remembers a request called {name}; ended ones are forgotten after "
                f"{MAX_ENDED:,} others"
            )
        return found

    async def recent(self, last_s: float, timeout_s: float | None = None) -> Described:
        """Return what has happened in the last seconds at all front ends that answer, within
        `timeout_s` if it is given: see `Histories.recent`."""
        answers, _ = await self._ask_frontends(
            lambda query_id: ListRecent(self._own_address, query_id, last_s), timeout_s
        )
        lists = answers.values()
        decisions = sorted(
            (each for one in lists for each in one["decisions"]), key=lambda each: each["time_s"]
        )
        return {
            "decisions": newest(decisions, MAX_DECISIONS, lambda each: each["event"]),
            "ttft_s": [each for one in lists for each in one["ttft_s"]],
            "tpot_s": [each for one in lists for each in one["tpot_s"]],
            "waiting": sum(one["waiting"] for one in lists),
        }

    async def _ask_frontends(
        self,
        question: Callable[[int], DescribeHistory | ListRecent],
        timeout_s: float | None = None,
    ) -> tuple[dict[FrontendId, Any], list[UnansweredError]]:
        """Return the answers of all front ends, this one's first, and the errors of the others."""
        others = sorted(self._frontends - {self._frontend_id})
        answers = {self._frontend_id: self._describe_here(question(0))}
        unanswered: list[UnansweredError] = []
        for frontend_id, answer in zip(
            others,
            await asyncio.gather(
                *(self._ask_frontend(each, question, timeout_s) for each in others),
                return_exceptions=True,
            ),
            strict=True,
        ):
            if isinstance(answer, UnansweredError):
                unanswered.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers[frontend_id] = answer
        return answers, unanswered

    async def _ask_frontend(
        self,
        frontend_id: FrontendId,
        question: Callable[[int], WireMessage],
        timeout_s: float | None,
    ) -> Any:
        def send(query_id: int) -> None:
            self._peers.send_to_frontend(frontend_id, question(query_id))

        name = frontend_name(frontend_id)
        try:
            async with asyncio.timeout(timeout_s):
                return _decoded(await self._questions.ask(None, send, name=name))
        except TimeoutError:
            raise UnansweredError(f"{name} did not answer within {timeout_s:g} s") from None

    async def migrate(self, name: str, destination: InstanceId, mode: Mode) -> list[Described]:
        """Move every request that the name stands for; return a report for each.

        If it stands for several, those that are at the destination already get no report.

        Raises:
            UnknownInstanceError: there is no such destination.
            UnknownRequestError: the name stands for no live request.
            ImmovableError: not all could be moved, or it waits at the scheduler.
            UnansweredError: an instance, or the scheduler where none has the request, died or does
                not answer.
        """
        _check_known(destination, self._peers.instances)
        lists = await asyncio.gather(*map(self._list_requests_of, self._peers.instances))
        where = {
            RequestId(each["id"]): InstanceId(each["instance"]) for one in lists for each in one
        }
        request_ids = meant(name, where)
        if not request_ids:
            if meant(name, [RequestId(each["id"]) for each in await self._list_held()]):
                raise ImmovableError(f"{name} waits at the scheduler: it is on no instance yet")
            raise UnknownRequestError(f"no live request is called {name}")
        moves = [
            self._migrate_one(request_id, where[request_id], destination, mode)
            for request_id in request_ids
            if where[request_id] != destination
        ]
        if not moves:
            raise ImmovableError(f"{name} is on {destination} already")
        replies = await asyncio.gather(*moves)
        refused = [reply for reply in replies if reply.error is not None]
        if refused:
            raise ImmovableError(_refusal(refused, len(request_ids)))
        return [_decoded(reply) for reply in replies]

    async def drain(self, instance_id: InstanceId, *, is_undo: bool = False) -> None:
        """Empty an instance and then end it, or undo that; returns when it has begun.

        Raises:
            UnknownInstanceError: there is no such instance, and none of that id is starting.
            FleetError: the supervisor refuses; the message says why.
            UnansweredError: there is no supervisor, or it does not answer.
        """
        absent = [each.instance_id for each in self._peers.membership.absent]
        _check_known(instance_id, (*self._peers.instances, *absent))
        await self._ask_supervisor(
            lambda query_id: DrainInstance(self._own_address, query_id, instance_id, is_undo)
        )

    async def drain_node(self, node: str, *, is_undo: bool = False) -> None:
        """Empty the instances of the node with this address and place none there, or undo that;
        returns when it has begun.

        Raises: as `drain`.
        """
        await self._ask_supervisor(
            lambda query_id: DrainNode(self._own_address, query_id, node, is_undo)
        )

    async def start_instances(self, num_instances: int) -> None:
        """Start this number of instances more; returns when that has begun.

        Raises: as `drain`.
        """
        await self._ask_supervisor(
            lambda query_id: StartInstances(self._own_address, query_id, num_instances)
        )

    async def restart(self, options: tuple[str, ...], *, has_surge: bool) -> Described:
        """Replace every instance, one at a time; returns when that has begun, with the `generation`
        of the new ones.

        Args:
            options: vLLM's options, which override those of the engines.
            has_surge: whether a successor starts before an instance is emptied.

        Raises: as `drain`.
        """
        reply = await self._ask_supervisor(
            lambda query_id: RestartInstances(self._own_address, query_id, has_surge, options)
        )
        described: Described = _decoded(reply)
        return described

    async def _ask_supervisor(self, message: Callable[[int], WireMessage]) -> AdminReply:
        def send(query_id: int) -> None:
            if not self._peers.send_to_supervisor(message(query_id)):
                raise UnansweredError("there is no supervisor at this moment; try again")

        reply = await self._questions.ask(None, send, name=SUPERVISOR)
        if reply.error is not None:
            raise FleetError(reply.error)
        return reply

    @property
    def _own_address(self) -> str:
        return self._peers.own_address

    async def _list_requests_of(self, instance_id: InstanceId) -> list[Described]:
        def message(query_id: int) -> WireMessage:
            return ListRequests(self._own_address, query_id)

        return self._listed(await self._ask(instance_id, message), instance_id)

    async def _list_held(self) -> list[Described]:
        """Those at the scheduler; without one, none waits there."""
        if self._peers.membership.scheduler is None:
            return []

        def send(query_id: int) -> None:
            self._peers.send_to_scheduler(ListRequests(self._own_address, query_id))

        return self._listed(await self._questions.ask(None, send), None)

    def _listed(self, reply: AdminReply, instance_id: InstanceId | None) -> list[Described]:
        return [
            {**request, "instance": instance_id, "class": self._class_of(request["priority"])}
            for request in _decoded(reply)
        ]

    def _class_of(self, rank: int) -> str:
        return self._classes.of_vllm_priority(-rank).name

    async def _migrate_one(
        self, request_id: RequestId, source: InstanceId, destination: InstanceId, mode: Mode
    ) -> AdminReply:
        def message(query_id: int) -> WireMessage:
            return MigrateRequest(self._own_address, query_id, request_id, destination, mode)

        return await self._ask(source, message)

    async def _ask(
        self, instance_id: InstanceId, message: Callable[[int], WireMessage]
    ) -> AdminReply:
        def send(query_id: int) -> None:
            self._peers.send_to_instance(instance_id, message(query_id))

        return await self._questions.ask(instance_id, send)


async def _in_time(listed: Awaitable[list[Described]], timeout_s: float) -> list[Described] | None:
    """The list, or None when it does not come within this time, or at all."""
    with suppress(TimeoutError, UnansweredError):
        async with asyncio.timeout(timeout_s):
            return await listed
    return None


def _check_known(instance_id: InstanceId, known: tuple[InstanceId, ...]) -> None:
    """Raises UnknownInstanceError."""
    if instance_id not in known:
        names = ", ".join(known) or "none"
        raise UnknownInstanceError(f"no instance is called {instance_id}; there are: {names}")


def _decoded(reply: AdminReply) -> Any:
    return msgspec.json.decode(reply.body)


def _refusal(refused: list[AdminReply], num_meant: int) -> str:
    reasons = "; ".join(f"{_decoded(each)['request']}: {each.error}" for each in refused)
    return f"{len(refused)} of {num_meant} not moved: {reasons}" if num_meant > 1 else reasons
