"""Copies of prefixes from one instance's cache to another's: those for which a request waits, and
those ahead of a session's next turn. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from sterna.config import DispatchRule, PolicyConfig, Soonest
from sterna.messages.actors import DispatchRequest
from sterna.messages.reasons import DispatchReason
from sterna.policy.candidate_table import CandidateTable
from sterna.policy.prefix_dispatch import copies_ahead, is_worth_a_copy, prefix_to_copy
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.scheduler.sessions import Sessions, ahead_of_next
from sterna.types import FrontendId, InstanceId, RequestId

COPY_LIMIT_S = 5.0
"""After this time a request is sent without its prefix. Copies that fail are reported; this is for
messages that are lost with an instance or a scheduler."""


class PrefixKnowledge(Protocol):
    """Knowledge of the instances' prefix caches."""

    def cached_tokens(self, request: DispatchRequest) -> Mapping[InstanceId, int]:
        """`NewRequest.cached` of the request."""

    def can_copy(self, source: InstanceId, destination: InstanceId) -> bool:
        """Whether prefixes can be copied from one of these instances to the other alone."""

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None:
        """The request is sent to the instance."""

    def on_cancel(self, request_id: RequestId) -> None:
        """The request was not sent there, or has ended."""

    def on_frontend_left(self, frontend_id: FrontendId) -> None:
        """The front end's requests have ended."""


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Tell the source to copy to the destination's prefix cache what it has of this prompt from
    this token on, on behalf of a request that will be sent there, or may be (`ahead_of_next`);
    `GlobalScheduler.on_prefix_done` ends the wait, if one waits."""

    request: DispatchRequest
    source: InstanceId
    destination: InstanceId
    first_token: int


@dataclass(frozen=True, slots=True)
class AwaitedCopy:
    """A request that waits for its prefix, and is to be sent to this instance.

    Attributes:
        held_since_s: when it began to wait for an instance.
        since_s: when its prefix began to be copied.
    """

    request: DispatchRequest
    new: NewRequest
    instance_id: InstanceId
    source: InstanceId
    held_since_s: float
    since_s: float
    reason: DispatchReason | None

    @property
    def until_s(self) -> float:
        """When it is sent without its prefix."""
        return self.since_s + COPY_LIMIT_S


class PrefixCopies:
    """What is copied between prefix caches, and for whom.

    Args:
        policy: whether and what it copies.
        knowledge: asked for each request if the policy looks at prefix caches; None: nothing is
            known of them, and nothing is copied.
    """

    def __init__(self, policy: PolicyConfig, knowledge: PrefixKnowledge | None) -> None:
        self._rule = policy.dispatch
        self._num_ahead = policy.num_session_copies
        self._knowledge = knowledge if policy.looks_at_prefixes else None
        self._sessions = Sessions()
        self._awaited: dict[RequestId, AwaitedCopy] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._awaited

    def __iter__(self) -> Iterator[DispatchRequest]:
        """The requests that wait."""
        return (each.request for each in self._awaited.values())

    @property
    def first_limit_s(self) -> float:
        """When the first of them is sent without its prefix; infinite without any."""
        return min((each.until_s for each in self._awaited.values()), default=math.inf)

    def overdue(self, now_s: float) -> list[RequestId]:
        """Those that have waited long enough."""
        return [name for name, each in self._awaited.items() if now_s >= each.until_s]

    def take(self, request_id: RequestId) -> AwaitedCopy | None:
        """The request no longer waits; returns what it waited for, or None if it did not."""
        return self._awaited.pop(request_id, None)

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None:
        """The request is sent to the instance, or will be."""
        if self._knowledge is not None:
            self._knowledge.on_dispatched(request, instance_id, now_s)
        if self._num_ahead and not request.has_adapter:
            self._sessions.on_dispatched(request, instance_id, now_s)

    def on_cancel(self, request_id: RequestId) -> None:
        """The request is not sent, or has ended."""
        self._awaited.pop(request_id, None)
        if self._knowledge is not None:
            self._knowledge.on_cancel(request_id)

    def on_frontend_left(self, frontend_id: FrontendId) -> None:
        """The front end's requests are gone."""
        self._awaited = {
            name: each
            for name, each in self._awaited.items()
            if each.request.frontend_id != frontend_id
        }
        if self._knowledge is not None:
            self._knowledge.on_frontend_left(frontend_id)

    def on_instance_left(self, instance_id: InstanceId) -> list[AwaitedCopy]:
        """The instance's cache is gone; returns the copies to it and from it, which still wait."""
        self._sessions.on_instance_left(instance_id)
        return [
            each
            for each in self._awaited.values()
            if instance_id in (each.instance_id, each.source)
        ]

    def as_new(self, request: DispatchRequest) -> NewRequest:
        """The request as rules see it, with what the caches have of its prompt."""
        return NewRequest(
            request.demand_tokens,
            request.execution_priority,
            request.session,
            request.prompt_tokens,
            {} if self._knowledge is None else self._knowledge.cached_tokens(request),
        )

    def copy_first(
        self,
        request: DispatchRequest,
        new: NewRequest,
        chosen: Candidate,
        reason: DispatchReason | None,
        held_since_s: float,
        now_s: float,
    ) -> CopyPrefix | None:
        """Have the part of the prefix copied that only another instance has, if it is worth it: the
        request waits for it. None: it is to be sent at once."""
        if isinstance(self._rule, DispatchRule) or self._knowledge is None or request.has_adapter:
            return None
        instance_id = chosen.instance_id
        source = prefix_to_copy(new, chosen, self._rule)
        if source is None or not self._knowledge.can_copy(source, instance_id):
            return None
        self._awaited[request.request_id] = AwaitedCopy(
            request, new, instance_id, source, held_since_s, now_s, reason
        )
        return CopyPrefix(request, source, instance_id, new.cached_tokens(instance_id))

    def copy_ahead(self, candidates: CandidateTable, now_s: float) -> list[CopyPrefix]:
        """Have prefixes of sessions copied ahead of their next turns, for which nothing waits."""
        rule, knowledge = self._rule, self._knowledge
        if not self._num_ahead or not isinstance(rule, Soonest) or knowledge is None:
            return []
        copies: list[CopyPrefix] = []
        for hot, free in copies_ahead(candidates, rule):
            source, destination = hot.instance_id, free.instance_id
            if not knowledge.can_copy(source, destination):
                continue
            for request in self._sessions.take(source, now_s):
                prompt = self.as_new(request)
                if is_worth_a_copy(prompt, source, destination, rule):
                    first_token = prompt.cached_tokens(destination)
                    copies.append(
                        CopyPrefix(ahead_of_next(request), source, destination, first_token)
                    )
                    break
            if len(copies) == self._num_ahead:
                break
        return copies
