"""Attempts: open requests of a front end, and sending them again after a lost instance. Pure.

A request is sent as an **attempt**. The first has the request's own id; each later one has an id
of its own, names the tokens that the client has, and goes on behind them. So messages for or from
an earlier attempt are never taken for those of the current one: tokens of a dead instance that
were still under way, or those of an instance that was believed not to have the request. An
instance that computes an attempt that is no longer open is told to stop.

Not every request is sent again. A request that makes instances die (a *poison request*) would take
them down one after the other. So deaths are counted for each request on the dead instance, until
the request brings `PROGRESS_TOKENS` more:

- the first death is a coincidence: the request goes on;
- if the second death finds only one such suspect, that one is guilty, and fails;
- if it finds several, at most one is guilty, and it is not known which: they go on **one at a
  time**, the next when the one before has brought its tokens or has ended. The suspect whose trial
  ends with another death is guilty;
- a trial may take long, since other requests may be served first. After a time-out the next one
  begins beside it, and a death that finds both decides nothing: they are tried again.

A request that brings enough tokens between deaths survives any number of them. Requests of other
front ends are not known here: a suspect that seems to be the only one may not be.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from sterna.messages.actors import DispatchRequest
from sterna.types import RequestId

PROGRESS_TOKENS = 8
"""A request that has brought this number of tokens since a death is no longer a suspect."""

MAX_GAPS = 3
"""Attempts in place of those whose tokens were lost. An instance that has missed the membership
with a new front end keeps tokens for it, and the next attempt may go there again."""

ATTEMPT_MARK = "+"
"""Stands between a request's id and the number of a later attempt; the first one has no number."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request that is to be sent again.

    Attributes:
        ask: with the attempt's id.
        payload: of the request, as it was first sent.
        output_token_ids: the tokens that its client has.
    """

    ask: DispatchRequest
    payload: bytes
    output_token_ids: tuple[int, ...]


DemandOf = Callable[[int], int]
"""Memory that an instance needs to admit a request of this many tokens, in tokens of whole blocks.
"""


def going_on(ask: DispatchRequest, num_tokens: int, demand_of: DemandOf | None) -> DispatchRequest:
    """Return what is asked of the scheduler for a request whose client has this many tokens.

    Args:
        ask: for the request from its beginning.
        demand_of: None: each token needs memory of its own.
    """
    if num_tokens == 0:
        return ask
    # The instance computes its tokens as it computes a prompt.
    prompt_tokens = ask.prompt_tokens + num_tokens
    demand_tokens = (
        ask.demand_tokens + num_tokens if demand_of is None else demand_of(prompt_tokens)
    )
    return structs.replace(
        ask, demand_tokens=demand_tokens, prompt_tokens=prompt_tokens, has_begun=True
    )


@dataclass(slots=True)
class _OpenRequest:
    """An open request.

    Attributes:
        num_at_death: number of tokens at the last death of an instance that had it, until it has
            brought enough more; None: it is no suspect.
        num_at_gap: number of tokens when some were lost; None: none were.
        num_gaps: times that some were lost with this number of tokens.
    """

    ask: DispatchRequest
    payload: bytes
    attempt_id: RequestId
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_attempts: int = 1
    num_at_death: int | None = None
    num_at_gap: int | None = None
    num_gaps: int = 0


class Attempts:
    """The open requests of one front end.

    Args:
        trial_timeout_s: after this time the next suspect's trial begins beside the current one.
        demand_of: see `going_on`.
    """

    def __init__(self, trial_timeout_s: float, demand_of: DemandOf | None = None) -> None:
        self._trial_timeout_s = trial_timeout_s
        self._demand_of = demand_of
        self._open_requests: dict[RequestId, _OpenRequest] = {}
        # By attempt, except first attempts.
        self._request_ids: dict[RequestId, RequestId] = {}
        self._suspects: deque[RequestId] = deque()
        self._on_trial: RequestId | None = None
        self._trial_ends_s = 0.0
        # Suspects whose trial timed out, and which have neither ended nor brought tokens since.
        self._unjudged: set[RequestId] = set()

    @property
    def next_deadline_s(self) -> float | None:
        """When `due` may next return something, or None while no suspect waits."""
        is_trial_awaited = self._on_trial is not None and self._suspects
        return self._trial_ends_s if is_trial_awaited else None

    def __len__(self) -> int:
        """The number of open requests."""
        return len(self._open_requests)

    def attempt_of(self, request_id: RequestId) -> RequestId:
        """Return the id under which the request is open; its own when it is not known."""
        request = self._open_requests.get(request_id)
        return request_id if request is None else request.attempt_id

    def request_of(self, attempt_id: RequestId) -> RequestId:
        """Return the request of an open attempt; the id itself when it is not known."""
        return self._request_ids.get(attempt_id, attempt_id)

    def has(self, request_id: RequestId) -> bool:
        """Whether the request is open."""
        return request_id in self._open_requests

    def num_tokens(self, request_id: RequestId) -> int:
        """Return the number of tokens that the open request's client has."""
        return len(self._open_requests[request_id].token_ids)

    def differs(self, attempt_id: RequestId, first_index: int, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens contradict what the client has."""
        request = self._open_requests.get(self.request_of(attempt_id))
        if request is None:
            return False
        known = request.token_ids[first_index : first_index + len(token_ids)]
        return known != array("I", token_ids[: len(known)])

    # ------------------------------------------------------------------------- what happens

    def open(
        self, ask: DispatchRequest, payload: bytes, output_token_ids: Iterable[int] = ()
    ) -> None:
        """A client's request has arrived; the client has these tokens already."""
        token_ids = array("I", output_token_ids)
        self._open_requests[ask.request_id] = _OpenRequest(ask, payload, ask.request_id, token_ids)

    def extend(self, request_id: RequestId, token_ids: Iterable[int]) -> None:
        """The client of the open request has these tokens too."""
        request = self._open_requests[request_id]
        request.token_ids.extend(token_ids)
        if request.num_at_death is not None and _has_progressed(request):
            request.num_at_death = None
            self._end_trial(request_id)

    def close(self, request_id: RequestId) -> None:
        """The request has ended, for whatever reason."""
        request = self._open_requests.pop(request_id, None)
        if request is None:
            return
        self._request_ids.pop(request.attempt_id, None)
        self._end_trial(request_id)
        if request_id in self._suspects:
            self._suspects.remove(request_id)

    def on_death(self, attempt_ids: Sequence[RequestId]) -> tuple[list[Attempt], list[RequestId]]:
        """These attempts were on an instance that died.

        Returns the attempts to send at once, and the guilty requests. Those that wait for their
        trial are in neither; see `due`.
        """
        found = [each for each in map(self.request_of, attempt_ids) if each in self._open_requests]
        suspects = [each for each in found if self._open_requests[each].num_at_death is not None]
        guilty = suspects if len(suspects) == 1 else []
        if self._unjudged.isdisjoint(suspects):
            guilty = guilty or [each for each in suspects if each == self._on_trial]
        for request_id in guilty:
            self.close(request_id)
        again = []
        for request_id in found:
            if request_id in guilty:
                continue
            request = self._open_requests[request_id]
            if request_id in suspects:
                self._end_trial(request_id)
                self._suspects.append(request_id)
                self._request_ids.pop(request.attempt_id, None)
            else:
                request.num_at_death = len(request.token_ids)
                again.append(self._again(request))
        return again, guilty

    def on_gap(self, attempt_id: RequestId) -> Attempt | None:
        """Tokens of this attempt were lost. Returns the next attempt; None if `MAX_GAPS` in a row
        brought no tokens."""
        request = self._open_requests.get(self.request_of(attempt_id))
        if request is None:
            return None
        num_tokens = len(request.token_ids)
        request.num_gaps = request.num_gaps + 1 if request.num_at_gap == num_tokens else 1
        request.num_at_gap = num_tokens
        return self._again(request) if request.num_gaps <= MAX_GAPS else None

    def next_attempt(self, attempt_id: RequestId) -> Attempt:
        """Return the next attempt in place of this open one, whose result no longer counts."""
        return self._again(self._open_requests[self.request_of(attempt_id)])

    def due(self, now_s: float) -> list[Attempt]:
        """Return the suspect whose trial begins, if there is one. Call this after every event, and
        when `next_deadline_s` has come."""
        if not self._suspects:
            return []
        if self._on_trial is not None:
            if now_s < self._trial_ends_s:
                return []
            self._unjudged.add(self._on_trial)
        request_id = self._on_trial = self._suspects.popleft()
        self._trial_ends_s = now_s + self._trial_timeout_s
        request = self._open_requests[request_id]
        request.num_at_death = len(request.token_ids)
        return [self._again(request)]

    def _end_trial(self, request_id: RequestId) -> None:
        self._unjudged.discard(request_id)
        if self._on_trial == request_id:
            self._on_trial = None

    def _again(self, request: _OpenRequest) -> Attempt:
        request_id = request.ask.request_id
        self._request_ids.pop(request.attempt_id, None)
        attempt_id = RequestId(f"{request_id}{ATTEMPT_MARK}{request.num_attempts}")
        request.num_attempts += 1
        request.attempt_id = attempt_id
        self._request_ids[attempt_id] = request_id
        ask = going_on(request.ask, len(request.token_ids), self._demand_of)
        ask = structs.replace(ask, request_id=attempt_id)
        return Attempt(ask, request.payload, tuple(request.token_ids))


def _has_progressed(request: _OpenRequest) -> bool:
    assert request.num_at_death is not None
    return len(request.token_ids) - request.num_at_death >= PROGRESS_TOKENS
