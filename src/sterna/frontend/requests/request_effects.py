"""Effects of the front end's cores. Pure."""

from dataclasses import dataclass
from enum import Enum

from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    CancelDispatch,
    DispatchRequest,
    FinalAck,
    OwnerQuery,
)
from sterna.types import InstanceId, RequestId


class Failure(Enum):
    """Reason for which a request ends with an error. Each value is shown to operators."""

    NO_INSTANCE = "no instance was there to serve it"
    OWNER_DIED = "its instance died and no other instance has it"
    KILLED_INSTANCES = "instances died while they served it, again and again"
    HANDED_BACK = (
        "it could not be moved from an instance that was to end, or its last tokens did not arrive"
    )
    TOKENS_LOST = "some of its tokens never arrived"
    TOO_LARGE = "it is larger than what can be sent to an instance"
    UNSENT = "its instance does not take what is sent to it"
    RESUMABLE = "a request whose input is streamed cannot be served"


@dataclass(frozen=True, slots=True)
class ToScheduler:
    """Send this to the scheduler."""

    message: DispatchRequest | CancelDispatch


@dataclass(frozen=True, slots=True)
class ToInstance:
    """Send this to the instance, with the payload if there is one."""

    instance_id: InstanceId
    message: AddRequest | AbortRequests | OwnerQuery | FinalAck
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client's stream this payload next.

    Attributes:
        num_repeated: number of leading tokens that the stream already has; they must be cut.
        is_finished: the payload ends the stream; the core has forgotten the request.
    """

    request_id: RequestId
    payload: bytes
    num_repeated: int
    is_finished: bool


@dataclass(frozen=True, slots=True)
class SendAgain:
    """A fact for the log: the request goes on after the tokens that its client has.

    Attributes:
        attempt_id: the id by which instances know the request from now on.
    """

    request_id: RequestId
    attempt_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error; the core has forgotten it."""

    request_id: RequestId
    failure: Failure


Effect = ToScheduler | ToInstance | Deliver | SendAgain | Fail
