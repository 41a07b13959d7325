"""Reasons of failed calls of Ray actors, in one line for the log."""

import ray


def origin_of(error: BaseException) -> BaseException:
    """Return the error that an actor's method has raised, unwrapped from those of Ray, of calls
    between actors and of task groups; any other error is its own origin."""
    while True:
        if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
            error = error.cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            return error


def reason_of(error: BaseException) -> str:
    """Return the error in one line. Not the first line of Ray's text for an error of an actor's
    method, which names only the call."""
    origin = origin_of(error)
    lines = str(origin).strip().splitlines()
    if origin is error and lines:
        return lines[0]
    return ": ".join([type(origin).__name__, *lines[:1]])
