"""What a front end keeps of its open requests, to send them again behind a lost instance. Pure.

A request is sent as an **attempt**. The first has the request's own id; each later one has an id
of its own, says which tokens the client has, and goes on behind them. So nothing that was meant
for, or comes from, a former attempt can be taken for the one that counts: tokens of a dead
instance that were still under way, or those of an instance that was believed not to have the
request. What comes under an id that is not open any more is told to stop.

Not every request is sent again. One that makes instances die would take them down one after the
other, so the deaths that found a request on the dead instance are counted, as long as it brings
no `PROGRESS_TOKENS` more between two of them:

- the first death is a coincidence: the request goes on;
- if the second one finds only one such request, it is guilty, and fails;
- if it finds several, all but one are innocent, or all, and nobody can tell which: they go on
  **one at a time**, the next when the one before has brought its tokens or has ended. The one
  whose trial ends with another death is guilty;
- a trial may take long, where others are served first. After a time the next begins beside it, and
  a death that finds both says nothing: they are tried again.

A request that goes on to bring tokens between deaths survives any number of them. What is not known
here is which requests of other front ends were there: who seems to be the only one may not be.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from sterna.messages.actors import DispatchRequest
from sterna.types import RequestId

PROGRESS_TOKENS = 8
"""A request that has brought so many tokens since an instance died with it is above suspicion."""

ATTEMPT_MARK = "+"
"""Stands between a request's id and the number of an attempt, the first of which has none."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request that is to be sent again.

    Attributes:
        ask: with the attempt's id.
        payload: of the request, as it was first sent.
        output_token_ids: what its client has.
    """

    ask: DispatchRequest
    payload: bytes
    output_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _History:
    """An open request.

    Attributes:
        num_at_death: how many tokens it had when an instance died with it, while it has not
            brought enough more; None: it is above suspicion.
        num_at_gap: how many it had when tokens were lost; None: none were.
    """

    ask: DispatchRequest
    payload: bytes
    attempt_id: RequestId
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_attempts: int = 1
    num_at_death: int | None = None
    num_at_gap: int | None = None


class Attempts:
    """The open requests of one front end.

    Args:
        trial_timeout_s: after so long a suspect's trial keeps no other one waiting.
    """

    def __init__(self, trial_timeout_s: float) -> None:
        self._trial_timeout_s = trial_timeout_s
        self._histories: dict[RequestId, _History] = {}
        # Of attempts that are not the first.
        self._requests: dict[RequestId, RequestId] = {}
        self._suspects: deque[RequestId] = deque()
        self._on_trial: RequestId | None = None
        self._trial_ends_s = 0.0
        # Suspects whose trial took too long, and that have neither ended nor brought tokens since.
        self._unjudged: set[RequestId] = set()

    @property
    def next_deadline_s(self) -> float | None:
        """When `due` may next return something, or None while no suspect waits."""
        is_awaited = self._on_trial is not None and self._suspects
        return self._trial_ends_s if is_awaited else None

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._histories)

    def attempt_of(self, request_id: RequestId) -> RequestId:
        """Return the id under which the request is open; its own when it is not known."""
        history = self._histories.get(request_id)
        return request_id if history is None else history.attempt_id

    def request_of(self, attempt_id: RequestId) -> RequestId:
        """Return the request of an open attempt; the id itself when it is not known."""
        return self._requests.get(attempt_id, attempt_id)

    def has(self, request_id: RequestId) -> bool:
        """Whether the request is open."""
        return request_id in self._histories

    def num_tokens(self, request_id: RequestId) -> int:
        """Return how many tokens the open request's client has."""
        return len(self._histories[request_id].token_ids)

    def differs(self, attempt_id: RequestId, first_index: int, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens contradict what the client has."""
        history = self._histories.get(self.request_of(attempt_id))
        if history is None:
            return False
        known = history.token_ids[first_index : first_index + len(token_ids)]
        return known != array("I", token_ids[: len(known)])

    # ------------------------------------------------------------------------- what happens

    def open(
        self, ask: DispatchRequest, payload: bytes, output_token_ids: Iterable[int] = ()
    ) -> None:
        """A client's request came, who has these tokens already."""
        token_ids = array("I", output_token_ids)
        self._histories[ask.request_id] = _History(ask, payload, ask.request_id, token_ids)

    def extend(self, request_id: RequestId, token_ids: Iterable[int]) -> None:
        """The client of the open request has these tokens too."""
        history = self._histories[request_id]
        history.token_ids.extend(token_ids)
        if history.num_at_death is not None and _has_progressed(history):
            history.num_at_death = None
            self._end_trial(request_id)

    def close(self, request_id: RequestId) -> None:
        """The request has ended, one way or another."""
        history = self._histories.pop(request_id, None)
        if history is None:
            return
        self._requests.pop(history.attempt_id, None)
        self._end_trial(request_id)
        if request_id in self._suspects:
            self._suspects.remove(request_id)

    def on_death(self, attempt_ids: Sequence[RequestId]) -> tuple[list[Attempt], list[RequestId]]:
        """These attempts were on an instance that died.

        Returns what is to be sent again at once, and which requests are guilty. Those that wait
        for their trial are neither; see `due`.
        """
        found = [each for each in map(self.request_of, attempt_ids) if each in self._histories]
        suspects = [each for each in found if self._histories[each].num_at_death is not None]
        guilty = suspects if len(suspects) == 1 else []
        if self._unjudged.isdisjoint(suspects):
            guilty = guilty or [each for each in suspects if each == self._on_trial]
        for request_id in guilty:
            self.close(request_id)
        again = []
        for request_id in found:
            if request_id in guilty:
                continue
            history = self._histories[request_id]
            if request_id in suspects:
                self._end_trial(request_id)
                self._suspects.append(request_id)
                self._requests.pop(history.attempt_id, None)
            else:
                history.num_at_death = len(history.token_ids)
                again.append(self._again(history))
        return again, guilty

    def on_gap(self, attempt_id: RequestId) -> Attempt | None:
        """Tokens of this attempt were lost. Returns it anew; None where that was tried already,
        and brought nothing."""
        history = self._histories.get(self.request_of(attempt_id))
        if history is None or history.num_at_gap == len(history.token_ids):
            return None
        history.num_at_gap = len(history.token_ids)
        return self._again(history)

    def anew(self, attempt_id: RequestId) -> Attempt:
        """Return this open attempt anew: what becomes of it where it is does not count."""
        return self._again(self._histories[self.request_of(attempt_id)])

    def due(self, now_s: float) -> list[Attempt]:
        """Return the suspect whose trial begins, if there is one. To be asked for after every
        event, and when `next_deadline_s` has come."""
        if not self._suspects:
            return []
        if self._on_trial is not None:
            if now_s < self._trial_ends_s:
                return []
            self._unjudged.add(self._on_trial)
        request_id = self._on_trial = self._suspects.popleft()
        self._trial_ends_s = now_s + self._trial_timeout_s
        history = self._histories[request_id]
        history.num_at_death = len(history.token_ids)
        return [self._again(history)]

    def _end_trial(self, request_id: RequestId) -> None:
        self._unjudged.discard(request_id)
        if self._on_trial == request_id:
            self._on_trial = None

    def _again(self, history: _History) -> Attempt:
        request_id = history.ask.request_id
        self._requests.pop(history.attempt_id, None)
        attempt_id = RequestId(f"{request_id}{ATTEMPT_MARK}{history.num_attempts}")
        history.num_attempts += 1
        history.attempt_id = attempt_id
        self._requests[attempt_id] = request_id
        num_tokens = len(history.token_ids)
        # Short by less than a block: front ends do not know how large those are.
        demand_tokens = history.ask.demand_tokens + num_tokens
        ask = structs.replace(history.ask, request_id=attempt_id, demand_tokens=demand_tokens)
        return Attempt(ask, history.payload, tuple(history.token_ids))


def _has_progressed(history: _History) -> bool:
    assert history.num_at_death is not None
    return len(history.token_ids) - history.num_at_death >= PROGRESS_TOKENS
