"""Dispatched requests that the engine does not show yet, and the dispatches to report. Pure."""

from bisect import bisect_left
from operator import itemgetter

from sterna.types import InstanceView, RequestId


class Admissions:
    """The requests that arrived at an instance and are in no view of its engine yet.

    An engine admits requests at the end of its step. Until then they are in no number of a load
    report, and have to stay in flight for the scheduler, which would otherwise see them nowhere.
    A dispatch is therefore reported when the engine has admitted it. It is reported by its number,
    which stands for all lower ones as well.
    """

    def __init__(self) -> None:
        self._numbers: dict[RequestId, int] = {}

    def add(self, request_id: RequestId, dispatch_number: int) -> None:
        """A request has arrived."""
        self._numbers[request_id] = dispatch_number

    def seen(self, view: InstanceView) -> list[int]:
        """Return the dispatch numbers that may be reported after this view of the engine."""
        if not self._numbers:
            return []
        shown = [
            number
            for request in (*view.running, *view.queuing)
            if (number := self._numbers.pop(request.request_id, None)) is not None
        ]
        return self._reportable(shown)

    def ended(self, request_id: RequestId) -> list[int]:
        """Return the dispatch numbers that may be reported after this request has left, or is
        shown."""
        dispatch_number = self._numbers.pop(request_id, None)
        return [] if dispatch_number is None else self._reportable([dispatch_number])

    def _reportable(self, numbers: list[int]) -> list[int]:
        """Those of these numbers, which have arrived, that stand for no request that has not. Each
        other one is reported with the last request that it stands for."""
        if not self._numbers:
            return numbers
        waiting = sorted(self._numbers.items(), key=itemgetter(1))
        lower = [number for _, number in waiting]
        found = []
        for number in sorted(numbers):
            place = bisect_left(lower, number)
            if place == 0:
                found.append(number)
            else:
                self._numbers[waiting[place - 1][0]] = number
        return found
