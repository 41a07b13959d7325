"""What the log says of an actor's end is its reason, and not the name of a call."""

import ray.exceptions

from sterna.runtime.supervisor.ray_errors import origin_of, reason_of

TAKEN = OSError(98, "Address already in use")
"""What a front end raises whose port has been taken meanwhile."""


def told(call: str, cause: Exception) -> ray.exceptions.RayTaskError:
    """The error as whoever has called this method of an actor gets it."""
    traceback = f"ray::{call}() (pid=4711, ip=127.0.0.1)\n  File ...\n{cause!r}"
    return ray.exceptions.RayTaskError(call, traceback, cause).as_instanceof_cause()


def test_the_reason_is_what_the_actors_method_has_raised() -> None:
    error = told("front end 1.start", TAKEN)
    assert str(error).startswith("ray::front end 1.start() (pid=4711")
    assert reason_of(error) == "OSError: [Errno 98] Address already in use"


def test_what_several_actors_and_tasks_have_handed_on_has_one_origin() -> None:
    handed_on = ExceptionGroup("unhandled errors in a TaskGroup", [told("supervisor.start", TAKEN)])
    error = told("scheduler.run", handed_on)
    assert origin_of(error) is TAKEN


def test_the_death_of_an_actor_is_told_in_rays_first_line() -> None:
    died = ray.exceptions.ActorDiedError()
    assert reason_of(died) == str(died).splitlines()[0]
    assert origin_of(died) is died


def test_an_error_without_words_has_a_name() -> None:
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert reason_of(told("supervisor.run", AssertionError())) == "AssertionError"
