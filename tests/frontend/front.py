"""A front end's one state machine, its inputs and its effects."""

import msgspec

from sterna.config import FrontendConfig, OnInstanceFailure
from sterna.frontend.requests.core import FrontendCore
from sterna.frontend.requests.request_effects import Effect, SendAgain, ToInstance
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    DispatchRequest,
    InstanceMember,
    Membership,
    OwnerReply,
    TokenBatch,
    TokenSpan,
)
from sterna.types import NORMAL, InstanceId, RequestId
from tests.frontend.requests.ownership_news import ME, R1

AGAIN = RequestId("r1+1")
CONFIG = FrontendConfig(gap_timeout_s=10.0, hold_timeout_s=60.0, owner_retry_s=0.25)
ABORT = FrontendConfig(on_instance_failure=OnInstanceFailure.ABORT, owner_timeout_s=1.0)


def ask(request_id: RequestId, num_tokens: int = 0) -> DispatchRequest:
    return DispatchRequest(
        *(ME, request_id, 64 + num_tokens, 0.0, NORMAL, NORMAL),
        prompt_tokens=60 + num_tokens,
        has_begun=num_tokens > 0,
    )


def request(request_id: RequestId) -> bytes:
    return msgspec.msgpack.encode([request_id, "all the rest"])


def output(request_id: RequestId, *token_ids: int) -> bytes:
    return msgspec.msgpack.encode([0, [[request_id, list(token_ids), "all the rest"]], "more"])


def membership(
    version: int,
    *instances: InstanceId,
    emptied: InstanceId | None = None,
    scheduler: str | None = None,
) -> Membership:
    members = tuple(
        InstanceMember(
            each, f"tcp://{each}", each == emptied, emptied_since=version * (each == emptied)
        )
        for each in instances
    )
    return Membership(version, members, (), scheduler)


class Front:
    """A core without a scheduler, so that the local rule places requests."""

    def __init__(self, *instances: InstanceId, config: FrontendConfig = CONFIG) -> None:
        self.core = FrontendCore(ME, config)
        self._version = 0
        assert self.live(*instances) == []

    def live(self, *instances: InstanceId, now_s: float = 0.0) -> list[Effect]:
        self._version += 1
        return self.core.on_message(membership(self._version, *instances), (), now_s)

    def request(self, request_id: RequestId = R1) -> list[Effect]:
        return self.core.on_request(ask(request_id), request(request_id), 0.0)

    def tokens(
        self,
        instance_id: InstanceId,
        first: int,
        *token_ids: int,
        of: RequestId = R1,
        ends: bool = False,
        now_s: float = 1.0,
    ) -> list[Effect]:
        batch = TokenBatch(instance_id, (TokenSpan(of, first, len(token_ids), ends),))
        return self.core.on_message(batch, [output(of, *token_ids)], now_s)

    def deny(self, instance_id: InstanceId, query_id: int) -> list[Effect]:
        return self.core.on_message(OwnerReply(instance_id, query_id, ()), (), 0.0)


def started(*instances: InstanceId, config: FrontendConfig = CONFIG) -> Front:
    """With one request, R1, on the first of these instances."""
    under_test = Front(*instances, config=config)
    assert under_test.request() == [add(instances[0], R1)]
    return under_test


def add(instance_id: InstanceId, request_id: RequestId, *token_ids: int) -> ToInstance:
    message = AddRequest(ME, request_id, 0, token_ids)
    return ToInstance(instance_id, message, request(request_id))


def again(instance_id: InstanceId, number: int, *token_ids: int, of: RequestId = R1):
    attempt_id = RequestId(f"{of}+{number}")
    return [
        SendAgain(of, attempt_id, len(token_ids)),
        add(instance_id, attempt_id, *token_ids),
    ]


def abort(instance_id: InstanceId, request_id: RequestId = R1) -> ToInstance:
    return ToInstance(instance_id, AbortRequests((request_id,)))
