"""Which dispatches an instance may say it has: those that its engine shows. Pure."""

from sterna.types import InstanceView, RequestId


class Admissions:
    """The requests that came to an instance and are in no view of its engine yet.

    An engine takes requests in when its step has ended. Until then they are in none of the numbers
    of a load report, and have to stay in flight for the scheduler, which would else see them
    nowhere. A dispatch is therefore reported when it is taken in, and by its number, which says
    that all below it have been, too.
    """

    def __init__(self) -> None:
        self._numbers: dict[RequestId, int] = {}

    def add(self, request_id: RequestId, dispatch_number: int) -> None:
        """A request has come."""
        self._numbers[request_id] = dispatch_number

    def seen(self, view: InstanceView) -> list[int]:
        """Return the numbers that may be reported now that the engine has shown this."""
        if not self._numbers:
            return []
        numbers = [
            self._numbers.pop(request.request_id, None)
            for request in (*view.running, *view.queuing)
        ]
        return [each for each in numbers if each is not None]

    def ended(self, request_id: RequestId) -> list[int]:
        """Return the numbers that may be reported now that this request is not here any more."""
        dispatch_number = self._numbers.pop(request_id, None)
        if dispatch_number is None:
            return []
        older = [each for each, number in self._numbers.items() if number < dispatch_number]
        if not older:
            return [dispatch_number]
        # It goes with the last of those that it would speak for.
        self._numbers[max(older, key=self._numbers.__getitem__)] = dispatch_number
        return []
