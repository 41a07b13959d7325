"""Accepted requests and the answers to their clients: the promises that clients can see."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from fault_simulation.oracle.token_oracle import EMPTY, Ask, extend, followed
from fault_simulation.virtual.timeline import Violation
from sterna.frontend.requests.attempts import ATTEMPT_MARK, PROGRESS_TOKENS
from sterna.frontend.requests.request_effects import Failure
from sterna.types import InstanceId, RequestId


class Status(Enum):
    """The state of a request, as its client sees it."""

    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted by its client"
    CUT = "cut by the death of its front end"


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        attempt_id: its id on instances (`frontend.requests.attempts`).
        frontend: the name of its front end's process.
        hosts: instances that have had it.
        attempt_hosts: those that have had its newest attempt.
        digest: of the tokens that its client has.
        num_at_death: number of tokens of its client when it was last sent again after the death of
            an instance that had it; None: it never was.
        is_handed_back: whether an instance has handed its newest attempt back.
        is_untold: whether its newest attempt has left its instance, which could not tell. If all
            deny it after a death, that counts as its instance's.
        is_unsent: whether its newest attempt could not be sent to an instance.
        has_holes: whether an instance could not send some of its newest attempt's tokens, or the
            news that it has them.
    """

    ask: Ask
    attempt_id: RequestId
    frontend: str
    accepted_s: float
    status: Status = Status.OPEN
    num_tokens: int = 0
    digest: int = EMPTY
    hosts: set[InstanceId] = field(default_factory=set)
    attempt_hosts: set[InstanceId] = field(default_factory=set)
    num_at_death: int | None = None
    is_handed_back: bool = False
    is_untold: bool = False
    is_unsent: bool = False
    has_holes: bool = False


class Ledger:
    """All requests.

    Attributes:
        dead_instances: those that failed; not those that were ended in order.
        given_up: instances that were reported as dead, and lived.
        hindered_until_s: until then a process that was stopped, or a link that was cut, may have
            kept messages from being sent or from arriving.
    """

    def __init__(self) -> None:
        self.records: dict[RequestId, Record] = {}
        self.num_open = 0
        self.hindered_until_s = 0.0
        self.dead_instances: set[InstanceId] = set()
        self.given_up: set[InstanceId] = set()

    @property
    def open(self) -> list[Record]:
        """Requests that have not ended."""
        return [each for each in self.records.values() if each.status is Status.OPEN]

    def count(self, status: Status) -> int:
        """The number of requests in this state."""
        return sum(each.status is status for each in self.records.values())

    def accept(self, ask: Ask, frontend: str, now_s: float, token_ids: Sequence[int] = ()) -> None:
        """A front end took the request, whose client has these tokens already."""
        self.num_open += 1
        record = self.records[ask.request_id] = Record(ask, ask.request_id, frontend, now_s)
        for token_id in token_ids:
            record.digest = extend(record.digest, token_id)
        record.num_tokens = len(token_ids)

    def on_hindrance(self, until_s: float) -> None:
        """A process is stopped, or a link is cut, until then."""
        self.hindered_until_s = max(self.hindered_until_s, until_s)

    def on_sent(self, attempt_id: RequestId, instance_id: InstanceId) -> None:
        """An instance has got the attempt."""
        record = self._record(attempt_id)
        record.hosts.add(instance_id)
        if attempt_id == record.attempt_id:
            record.attempt_hosts.add(instance_id)

    def on_sent_again(
        self,
        request_id: RequestId,
        attempt_id: RequestId,
        num_tokens: int,
        *,
        is_by_time: bool,
        is_late: bool = False,
    ) -> None:
        """The request continues after this number of tokens, under another id.

        Args:
            is_by_time: because a time-out has passed.
            is_late: some message may be on its way for longer than it should be.

        Raises:
            Violation: its client does not have exactly these, or waits for nothing, or there was no
                need, or an instance may still step the request that cannot be told to stop.
        """
        record = self.records[request_id]
        if record.status is not Status.OPEN:
            raise Violation(f"{request_id} is sent again after its end: {record.status.value}")
        if num_tokens != record.num_tokens:
            raise Violation(
                f"{request_id} goes on behind {num_tokens} tokens, and its client has "
                f"{record.num_tokens}"
            )
        if given_up := record.hosts & self.given_up:
            raise Violation(f"{request_id} is sent again, and {min(given_up)} that has it lives")
        has_died = not record.attempt_hosts.isdisjoint(self.dead_instances)
        has_waited = is_by_time and (is_late or record.has_holes)
        has_left = record.is_handed_back or record.is_untold
        if not has_waited and not has_died and not has_left:
            raise Violation(f"{request_id} is sent again, and no instance that had it has failed")
        if has_died or record.is_untold:
            record.num_at_death = num_tokens
        record.attempt_id, record.attempt_hosts = attempt_id, set()
        record.is_handed_back = record.is_untold = record.is_unsent = record.has_holes = False

    def on_unsent(self, attempt_id: RequestId) -> None:
        """The mailbox of its front end has refused to send the attempt."""
        if self.is_awaited(attempt_id):
            self._record(attempt_id).is_unsent = True

    def on_tokens_unsent(self, attempt_ids: Iterable[RequestId]) -> None:
        """The mailbox of an instance has refused to send tokens of these."""
        for attempt_id in attempt_ids:
            if self.is_awaited(attempt_id):
                self._record(attempt_id).has_holes = True

    def is_awaited(self, attempt_id: RequestId) -> bool:
        """Whether the client waits for this attempt, and not for a later one."""
        record = self._record(attempt_id)
        return record.status is Status.OPEN and record.attempt_id == attempt_id

    def on_client_gone(self, request_id: RequestId) -> bool:
        """The client aborts the request; returns whether it had not ended yet."""
        record = self.records[request_id]
        is_open = record.status is Status.OPEN
        if is_open:
            self._end(record, Status.ABORTED)
        return is_open

    def on_frontend_death(self, frontend: str) -> None:
        """The streams of the front end are cut."""
        for record in self.open:
            if record.frontend == frontend:
                self._end(record, Status.CUT)

    def on_ended_in_order(self, instance_id: InstanceId, attempt_ids: Iterable[RequestId]) -> None:
        """An instance is ended because it is no longer needed.

        Raises:
            Violation: a client waits for one of these requests, which it has.
        """
        for attempt_id in attempt_ids:
            if self.is_awaited(attempt_id):
                raise Violation(f"{instance_id} is ended and has {attempt_id}")

    def on_handed_back(self, attempt_ids: Iterable[RequestId]) -> None:
        """An instance that is being emptied hands these back: they continue elsewhere."""
        for attempt_id in attempt_ids:
            if self.is_awaited(attempt_id):
                self._record(attempt_id).is_handed_back = True

    def on_untold(self, attempt_ids: Iterable[RequestId]) -> None:
        """The mailbox of an instance has refused the news that these have left it."""
        for attempt_id in attempt_ids:
            if self.is_awaited(attempt_id):
                self._record(attempt_id).is_untold = True

    def on_engine_abort(self, request_id: RequestId) -> None:
        """An instance ends the request in its engine.

        Raises:
            Violation: its client still waits for it, and it was not handed back.
        """
        if self.is_awaited(request_id) and not self._record(request_id).is_handed_back:
            raise Violation(f"{request_id} was ended on an instance, and its client waits for it")

    def on_tokens(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        digests: Sequence[int],
        *,
        is_finished: bool,
    ) -> None:
        """The client gets these tokens next.

        Raises:
            Violation: they are not what a single engine would have generated.
        """
        record = self.records[request_id]
        if record.status is not Status.OPEN:
            raise Violation(f"{request_id} got tokens after its end: {record.status.value}")
        record.num_tokens, record.digest = followed(
            record.ask, record.num_tokens, record.digest, zip(token_ids, digests, strict=True)
        )
        if is_finished:
            if record.num_tokens != record.ask.output_tokens:
                raise Violation(
                    f"{request_id} ended after {record.num_tokens} of "
                    f"{record.ask.output_tokens} tokens"
                )
            self._end(record, Status.FINISHED)

    def on_failure(self, request_id: RequestId, failure: Failure) -> None:
        """The client is told that its request has failed.

        Raises:
            Violation: the rules do not allow it.
        """
        record = self.records[request_id]
        if record.status is not Status.OPEN:
            raise Violation(f"{request_id} failed after its end: {record.status.value}")
        self._end(record, Status.FAILED)
        if failure is Failure.UNSENT and record.is_unsent:
            return
        if failure is Failure.TOKENS_LOST and record.has_holes:
            return
        if failure is not Failure.KILLED_INSTANCES:
            raise Violation(f"{request_id} failed: {failure.value}")
        if record.attempt_hosts.isdisjoint(self.dead_instances) and not record.is_untold:
            raise Violation(f"{request_id} is judged guilty, and no instance has died with it")
        if record.num_at_death is None:
            raise Violation(f"{request_id} is judged guilty by the first death that found it")
        num_since = record.num_tokens - record.num_at_death
        if num_since >= PROGRESS_TOKENS:
            raise Violation(
                f"{request_id} is judged guilty, and has brought {num_since} tokens since a death"
            )

    def on_judgement(self, guilty: Sequence[RequestId]) -> None:
        """After one event, these requests are judged to have killed an instance.

        Raises:
            Violation: they are more than one.
        """
        if len(guilty) > 1:
            raise Violation(f"{', '.join(guilty)} are judged guilty at once")

    def one_of(self, rng: Random, attempt_ids: Sequence[RequestId]) -> Record | None:
        """Draw one of these requests whose client waits for it, or None."""
        records = [self._record(each) for each in attempt_ids]
        waiting = [each for each in records if each.status is Status.OPEN]
        return rng.choice(waiting) if waiting else None

    def _end(self, record: Record, status: Status) -> None:
        record.status = status
        self.num_open -= 1

    def _record(self, attempt_id: RequestId) -> Record:
        return self.records[request_of(attempt_id)]

    def check_ended(self, now_s: float) -> None:
        """After all has healed.

        Raises:
            Violation: a request has not ended.
        """
        for record in self.open:
            raise Violation(
                f"{record.ask.request_id} has not ended after {now_s - record.accepted_s:.1f} s: "
                f"{record.num_tokens} of {record.ask.output_tokens} tokens came"
            )


def request_of(attempt_id: RequestId) -> RequestId:
    """The request of which this is an attempt."""
    return RequestId(attempt_id.split(ATTEMPT_MARK)[0])
