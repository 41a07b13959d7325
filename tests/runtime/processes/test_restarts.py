"""The limit of restarts."""

from sterna.runtime.processes.restarts import MAX_SHORT_LIVES, SHORT_LIFE_S, RestartLimit


def lives(*durations_s: float) -> list[bool]:
    """Whether to give up, after each of these lives."""
    limit, now_s, found = RestartLimit(), 0.0, []
    for duration_s in durations_s:
        limit.on_begun(now_s)
        now_s += duration_s
        found.append(limit.on_death(now_s))
    return found


def test_one_that_works_and_is_killed_is_replaced_however_often() -> None:
    """Four kills of the driver within a minute, ten seconds apart, ended a server that served."""
    assert not any(lives(*[2 * SHORT_LIFE_S] * 20))


def test_after_some_short_lives_in_a_row_another_one_would_not_help() -> None:
    short = [SHORT_LIFE_S / 2]
    assert lives(*short * MAX_SHORT_LIVES) == [False] * (MAX_SHORT_LIVES - 1) + [True]
    assert not any(lives(*(short * (MAX_SHORT_LIVES - 1) + [SHORT_LIFE_S]) * 5))
