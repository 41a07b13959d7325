"""Ownership: which instance has which request of this front end, also after deaths. Pure.

Without deaths, the owner is the instance to which the request was sent, or the last one that said
that the request runs there, or sent later tokens of it than all before. Each instance has a
connection of its own, so this news may arrive out of order: of two pieces the later one is that
with the higher index of the request's next token. If the sender dies, its news does not arrive at
all: a request may have moved to an instance that died before it could say so. Therefore **a death
puts every request in doubt**. All instances are asked about all requests in doubt:

- A request is out of doubt when an instance has it. If that instance has given it away since, the
  next owner says so, or dies, which puts the request in doubt again.
- A request that is only arriving at an instance, or leaving it with the commit under way, stays in
  doubt, and the question is repeated, since the request may never arrive, or may be gone. The doubt
  ends when that instance shows that the request runs there: messages of one connection arrive in
  order, so this news is later than the answer.
- A request that no instance claims has died with its instance. It is given up only when every live
  instance has denied it, never because one is slow to answer: a slow one gets the same question
  again. An instance may say that it has a request before this front end knows of its start; it
  counts from then on. It says which membership it knows, so it is not taken for a dead one.
- A move of the request, or another death, voids the answers so far: an instance that denied the
  request may have it since.
- A request that its owner, as far as is known, denies was passed on. The instance that has got it
  may have denied it before that: if all deny it, all are asked once more.
- An instance that denies a request may have passed it on to one that this front end does not know
  yet. It says which membership it knows; the request stays in doubt until this front end knows that
  one, or a later one. The supervisor's mailbox sends it until it arrives, and the first membership
  of a supervisor's successor is later than all of its predecessor.
- A missed membership (after the death of a supervisor) may have named an instance that has died
  since: it counts as a death.

Streams go on meanwhile: clients do not see the doubt.

An instance that denied a request can only get it from a live peer, in a migration that begins
later. If that migration ends before the peer has answered, and the peer was not known to have the
request, all have denied a request that lives: its new owner's news is still under way. If requests
are given up for good, `Ownership` waits for that news. If they are sent again under another id, it
need not: the instance that has the old attempt is told to stop.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sterna.frontend.requests.request_effects import Effect, Fail, Failure, ToInstance
from sterna.messages.actors import AbortRequests, OwnerQuery, OwnerReply, RequestsMoved, TokenSpan
from sterna.types import FrontendId, InstanceId, RequestId


@dataclass(slots=True)
class _Doubt:
    """A request whose owner is in doubt.

    Attributes:
        deadline_s: when it is decided, or instances are asked again.
        is_aborted: its client has gone; an instance that claims it is told so.
        queries: the last query to each instance; answers to older ones are void.
        unanswered: instances that have not answered their query.
        claimant: the instance that last answered that the request is arriving there.
        is_passed_on: its owner, as far as is known, has denied it.
        version: that of the newest membership known to an instance that has denied it.
    """

    deadline_s: float
    is_aborted: bool = False
    queries: dict[InstanceId, int] = field(default_factory=dict)
    unanswered: set[InstanceId] = field(default_factory=set)
    claimant: InstanceId | None = None
    is_passed_on: bool = False
    version: int = 0


@dataclass(slots=True)
class _Newcomer:
    """An instance that sent news before this front end got the membership with it.

    Attributes:
        version: of the membership that it knows.
        request_ids: the requests that it has adopted by its own news. It may have them, and can be
            asked only when a membership with its address has arrived.
    """

    version: int
    request_ids: set[RequestId] = field(default_factory=set)


class Ownership:
    """The requests that were sent to instances.

    Args:
        owner_timeout_s: after this time a doubt is decided, or instances are asked again.
        decides_at_once: give a request up as soon as every live instance has denied it, without
            waiting for news.
    """

    def __init__(
        self, frontend_id: FrontendId, owner_timeout_s: float, *, decides_at_once: bool = False
    ) -> None:
        self._decides_at_once = decides_at_once
        self._frontend_id = frontend_id
        self._owner_timeout_s = owner_timeout_s
        self._instances: tuple[InstanceId, ...] = ()
        self._version = 0
        self._newcomers: dict[InstanceId, _Newcomer] = {}
        self._owners: dict[RequestId, InstanceId] = {}
        # By request: index of the next token, by the last news of its owner.
        self._known_to: dict[RequestId, int] = {}
        self._num_owned: Counter[InstanceId] = Counter()
        # In the order of their deadlines: each is entered with the same time-out.
        self._doubts: dict[RequestId, _Doubt] = {}
        self._queries: dict[int, tuple[InstanceId, tuple[RequestId, ...]]] = {}
        self._next_query_id = 1

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, or None when nothing is in doubt."""
        first = next(iter(self._doubts.values()), None)
        return None if first is None else first.deadline_s

    def owner(self, request_id: RequestId) -> InstanceId | None:
        """Return the instance that has the request, as far as is known."""
        return self._owners.get(request_id)

    def num_owned(self, instance_id: InstanceId) -> int:
        """Return the number of requests that the instance has."""
        return self._num_owned[instance_id]

    def on_sent(self, request_id: RequestId, instance_id: InstanceId) -> None:
        """The request was sent to this instance."""
        self._own(request_id, instance_id)

    def on_ended(self, request_id: RequestId) -> None:
        """The request's stream has ended."""
        self._disown(request_id)
        self._doubts.pop(request_id, None)

    def on_moved(self, moved: RequestsMoved, now_s: float) -> list[Effect]:
        """An instance says that it has adopted these requests.

        News of a dead instance says nothing about the owner of the request.
        """
        instance_id = moved.instance_id
        if instance_id not in self._instances:
            if moved.version <= self._version:
                return []
            newcomer = self._newcomers.setdefault(instance_id, _Newcomer(moved.version))
            newcomer.version = moved.version
            newcomer.request_ids.update(moved.request_ids)
        restarted = []
        for request_id, first_index in zip(moved.request_ids, moved.first_indices, strict=True):
            self._own_if_fresh(request_id, instance_id, first_index, first_index)
            doubt = self._doubts.get(request_id)
            if doubt is not None and not self._settles(doubt, instance_id, request_id):
                self._begin_round(request_id, now_s)
                restarted.append(request_id)
        return self._query(restarted)

    def on_tokens(self, instance_id: InstanceId, spans: Iterable[TokenSpan]) -> None:
        """The instance sent these tokens, each span later than all before of its request."""
        if instance_id not in self._instances and instance_id not in self._newcomers:
            return
        for span in spans:
            request_id, end = span.request_id, span.first_index + span.num_tokens
            self._own_if_fresh(request_id, instance_id, span.first_index, end)
            if self._doubts and (doubt := self._doubts.get(request_id)) is not None:
                self._settles(doubt, instance_id, request_id)

    def on_owner_reply(self, reply: OwnerReply, now_s: float) -> list[Effect]:
        """An instance has these requests, of those about which it was asked, or may get them."""
        _, request_ids = self._queries.pop(reply.query_id, (None, ()))
        here, arriving = set(reply.request_ids), set(reply.arriving)
        aborted = []
        effects: list[Effect] = []
        for request_id in request_ids:
            doubt = self._doubts.get(request_id)
            if doubt is None or doubt.queries.get(reply.instance_id) != reply.query_id:
                continue
            doubt.unanswered.discard(reply.instance_id)
            if doubt.is_aborted and request_id in here | arriving:
                aborted.append(request_id)
            if request_id in here:
                del self._doubts[request_id]
                if not doubt.is_aborted:
                    self._confirm(request_id, reply.instance_id)
            elif request_id in arriving:
                doubt.claimant = reply.instance_id
            else:
                doubt.is_passed_on |= self._owners.get(request_id) == reply.instance_id
                doubt.version = max(doubt.version, reply.version)
                if self._decides_at_once:
                    effects += self._decide(request_id, now_s)
                elif not doubt.unanswered:
                    # The denial of the instance that passed it on may arrive before the news of the
                    # new owner.
                    self._put_off(request_id, now_s)
        effects += self._query(self._unasked(request_ids))
        return _aborts({reply.instance_id: aborted}) + effects

    def on_abort(self, request_ids: Iterable[RequestId]) -> list[Effect]:
        """The clients of these requests have gone; unknown requests have ended already."""
        by_instance: dict[InstanceId, list[RequestId]] = {}
        for request_id in request_ids:
            believed = {self._owners.get(request_id)}
            self._disown(request_id)
            doubt = self._doubts.get(request_id)
            if doubt is not None:
                doubt.is_aborted = True
                believed.add(doubt.claimant)
            for instance_id in sorted(each for each in believed if each is not None):
                by_instance.setdefault(instance_id, []).append(request_id)
        return _aborts(by_instance)

    def on_instances(
        self, instances: Sequence[InstanceId], now_s: float, version: int = 0
    ) -> list[Effect]:
        """These instances live in the membership of this version. Any other known one is dead for
        good, unless its news named a later version."""
        there = {*self._instances, *self._newcomers}
        # After the death of a supervisor: instances that started and died in a missed version are
        # never announced again.
        has_missed_some = version > self._version + 1
        self._version = version
        self._newcomers = {
            each: newcomer
            for each, newcomer in self._newcomers.items()
            if newcomer.version > version and each not in instances
        }
        dead = there - {*instances, *self._newcomers}
        self._instances = tuple(instances)
        if dead or has_missed_some:
            self._queries = {
                query_id: query for query_id, query in self._queries.items() if query[0] not in dead
            }
            in_doubt = [*self._doubts, *(each for each in self._owners if each not in self._doubts)]
            for request_id in in_doubt:
                self._begin_round(request_id, now_s)
                owner = self._owners.get(request_id)
                if owner in dead:
                    self._disown(request_id)
        effects = self._query(list(self._doubts))
        if self._decides_at_once:
            # No instance is left to ask, or this membership was all that a decision waited for.
            for request_id in list(self._doubts):
                effects += self._decide(request_id, now_s)
            effects += self._query(self._unasked(self._doubts))
        return effects

    def on_time(self, now_s: float) -> list[Effect]:
        """Decide the doubts whose deadline has come."""
        due = [each for each, doubt in self._doubts.items() if doubt.deadline_s <= now_s]
        unanswered: list[RequestId] = []
        effects: list[Effect] = []
        for request_id in due:
            doubt = self._doubts[request_id]
            if doubt.claimant is not None and not doubt.is_aborted:
                self._begin_round(request_id, now_s)
            elif doubt.claimant is None and self._is_open(doubt, request_id):
                self._put_off(request_id, now_s)
                unanswered.append(request_id)
            else:
                effects += self._decide(request_id, now_s)
        return effects + self._repeat_queries(unanswered) + self._query(self._unasked(due))

    def _decide(self, request_id: RequestId, now_s: float) -> list[Effect]:
        """Give the request up if all instances have denied it. If its owner has passed it on,
        another round begins instead, in which all are asked again."""
        doubt = self._doubts[request_id]
        is_open = self._is_open(doubt, request_id)
        if is_open if doubt.claimant is None else not doubt.is_aborted:
            return []
        self._disown(request_id)
        if doubt.is_passed_on and not doubt.is_aborted and len(self._instances) > 1:
            self._begin_round(request_id, now_s)
            return []
        del self._doubts[request_id]
        return [] if doubt.is_aborted else [Fail(request_id, Failure.OWNER_DIED)]

    def _put_off(self, request_id: RequestId, now_s: float) -> None:
        """Wait once more; the doubt becomes the last to be due."""
        doubt = self._doubts.pop(request_id)
        doubt.deadline_s = now_s + self._owner_timeout_s
        self._doubts[request_id] = doubt

    def _is_open(self, doubt: _Doubt, request_id: RequestId) -> bool:
        """Return whether an instance that has not denied the request may have it."""
        newcomers = self._newcomers.values()
        return (
            bool(doubt.unanswered)
            or doubt.version > self._version
            or any(request_id in each.request_ids for each in newcomers)
        )

    def _begin_round(self, request_id: RequestId, now_s: float) -> None:
        """Void all answers about this request; it becomes the last to be due."""
        doubt = self._doubts.pop(request_id, None)
        is_aborted = doubt is not None and doubt.is_aborted
        self._doubts[request_id] = _Doubt(now_s + self._owner_timeout_s, is_aborted)

    def _unasked(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """Those of these requests for which a new round has begun, with no instance asked yet."""
        doubts = ((each, self._doubts.get(each)) for each in request_ids)
        return [each for each, doubt in doubts if doubt is not None and not doubt.queries]

    def _settles(self, doubt: _Doubt, instance_id: InstanceId, request_id: RequestId) -> bool:
        """End the doubt if this instance is the one at which the request was arriving."""
        is_settled = doubt.claimant == instance_id and not doubt.is_aborted
        if is_settled:
            del self._doubts[request_id]
            self._confirm(request_id, instance_id)
        return is_settled

    def _query(self, request_ids: Sequence[RequestId]) -> list[Effect]:
        """Ask every instance about those of these requests about which it was not asked yet."""
        effects: list[Effect] = []
        for instance_id in self._instances:
            unasked = tuple(
                each for each in request_ids if instance_id not in self._doubts[each].queries
            )
            if not unasked:
                continue
            query_id = self._next_query_id
            self._next_query_id += 1
            self._queries[query_id] = (instance_id, unasked)
            query = OwnerQuery(self._frontend_id, query_id, unasked)
            effects.append(ToInstance(instance_id, query))
            for request_id in unasked:
                self._doubts[request_id].queries[instance_id] = query_id
                self._doubts[request_id].unanswered.add(instance_id)
        return effects

    def _repeat_queries(self, request_ids: Sequence[RequestId]) -> list[Effect]:
        """Repeat the unanswered queries about these requests unchanged, so that an answer that is
        only late counts."""
        doubts = [self._doubts[each] for each in request_ids]
        query_ids = {doubt.queries[each] for doubt in doubts for each in doubt.unanswered}
        effects: list[Effect] = []
        for query_id in sorted(query_ids):
            instance_id, asked = self._queries[query_id]
            query = OwnerQuery(self._frontend_id, query_id, asked)
            effects.append(ToInstance(instance_id, query))
        return effects

    def _own_if_fresh(
        self, request_id: RequestId, instance_id: InstanceId, first_index: int, known_to: int
    ) -> None:
        """Make the instance the owner, unless later news names another one.

        Args:
            first_index: the request's next token when it was on the instance.
            known_to: the request is known to be there up to this token.
        """
        owner = self._owners.get(request_id)
        if owner is None or first_index < self._known_to[request_id]:
            return
        if owner == instance_id:
            self._known_to[request_id] = known_to
        else:
            self._own(request_id, instance_id, known_to)

    def _confirm(self, request_id: RequestId, instance_id: InstanceId) -> None:
        """Make the instance the owner. The index of the next token is not known: a source that
        keeps the request of a dead destination knows fewer tokens than that one has sent."""
        if self._owners.get(request_id) != instance_id:
            self._own(request_id, instance_id)

    def _own(self, request_id: RequestId, instance_id: InstanceId, known_to: int = 0) -> None:
        self._disown(request_id)
        self._owners[request_id] = instance_id
        self._known_to[request_id] = known_to
        self._num_owned[instance_id] += 1

    def _disown(self, request_id: RequestId) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return
        del self._known_to[request_id]
        self._num_owned[owner] -= 1
        if not self._num_owned[owner]:
            del self._num_owned[owner]


def _aborts(by_instance: dict[InstanceId, list[RequestId]]) -> list[Effect]:
    return [
        ToInstance(instance_id, AbortRequests(tuple(request_ids)))
        for instance_id, request_ids in by_instance.items()
        if request_ids
    ]
