"""What front ends hear of who has which request."""

from sterna.messages.actors import RequestsMoved, TokenSpan
from sterna.types import FrontendId, InstanceId, RequestId

ME = FrontendId(7)
I0, I1, I2, I3 = (InstanceId(f"i{number}") for number in range(4))
R1, R2 = RequestId("r1"), RequestId("r2")


def moved(
    instance_id: InstanceId, first_index: int, *request_ids: RequestId, version: int = 0
) -> RequestsMoved:
    return RequestsMoved(instance_id, request_ids, (first_index,) * len(request_ids), version)


def span(request_id: RequestId, first_index: int) -> TokenSpan:
    return TokenSpan(request_id, first_index, 1, False)
