"""Why a call of an actor has failed, in one line for the log."""

import ray


def origin_of(error: BaseException) -> BaseException:
    """Return the error that an actor's method has raised, out of all that Ray, the calls of other
    actors and groups of tasks have put around it; any other error is its own origin."""
    while True:
        if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
            error = error.cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            return error


def reason_of(error: BaseException) -> str:
    """Return the error in one line. As Ray prints what an actor's method has raised, the first line
    names the call only."""
    origin = origin_of(error)
    lines = str(origin).strip().splitlines()
    if origin is error and lines:
        return lines[0]
    return ": ".join([type(origin).__name__, *lines[:1]])
