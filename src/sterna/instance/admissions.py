"""Dispatched requests that the engine does not show yet, and the dispatches to report. Pure."""

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
            request.request_id
            for request in (*view.running, *view.queuing)
            if request.request_id in self._numbers
        ]
        return [number for request_id in shown for number in self.ended(request_id)]

    def ended(self, request_id: RequestId) -> list[int]:
        """Return the dispatch numbers that may be reported after this request has left, or is
        shown."""
        dispatch_number = self._numbers.pop(request_id, None)
        if dispatch_number is None:
            return []
        older = [each for each, number in self._numbers.items() if number < dispatch_number]
        if not older:
            return [dispatch_number]
        # Its number stands for the lower ones: it is reported with the last of them.
        self._numbers[max(older, key=self._numbers.__getitem__)] = dispatch_number
        return []
