"""A step of an emulated engine, and the tokens that it produces. Pure."""

from dataclasses import dataclass

from sterna.types import RequestId


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way, or an empty one: nothing can run.

    Attributes:
        duration_s: its duration; 0 when it is empty.
        scheduled: the requests that it computes, with the number of their tokens, in order.
        admitted: the scheduled requests that queued before this step.
        cached: for each of the admitted, how many of its tokens the prefix cache had.
        preempted: requests that were preempted when the step began, in order.
        decoded: the scheduled requests of which only the last token's KV is missing.
    """

    duration_s: float
    scheduled: tuple[tuple[RequestId, int], ...]
    admitted: tuple[RequestId, ...] = ()
    cached: tuple[int, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    decoded: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a step produced.

    Attributes:
        index: its place in the request's output, from 0.
        is_last: the request has finished with it.
    """

    request_id: RequestId
    index: int
    is_last: bool
