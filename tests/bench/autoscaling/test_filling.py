"""How soon an instance that comes up has its share of the load."""

from bench.autoscaling.filling import Filling, fillings_of
from bench.serving.observer import ClusterSample, InstanceSample


def sample(time_s: float, **batches: int | str) -> ClusterSample:
    """An instance for each keyword: its batch, or its state where it does not serve. The first
    one has sent a request away for every second."""
    return ClusterSample(
        time_s,
        tuple(
            InstanceSample(
                id=name,
                state=value if isinstance(value, str) else "running",
                total_tokens=1000,
                used_tokens=0,
                freeness=1.0,
                running=0 if isinstance(value, str) else value,
                queuing=0,
                migrating=0,
                migrations_committed=int(time_s) if name == "a" else 0,
            )
            for name, value in batches.items()
        ),
    )


def test_those_that_were_there_at_first_do_not_come() -> None:
    assert fillings_of([sample(0, a=1), sample(1, a=5)]) == []
    assert fillings_of([]) == []


def test_an_instance_is_filled_when_its_batch_is_half_of_the_others() -> None:
    samples = [
        sample(0, a=8),
        sample(1, a=8, b="starting"),
        sample(2, a=8, b=0),
        sample(3, a=6, b=2),
        sample(4, a=5, b=3),
        sample(5, a=4, b=4),
    ]
    assert fillings_of(samples) == [Filling("b", ready_s=2.0, filled_s=2.0, migrations=3)]


def test_one_that_nobody_needs_is_never_filled() -> None:
    samples = [sample(0, a=8), sample(1, a=8, b=1), sample(2, a=8, b=1), sample(3, a=9)]
    assert fillings_of(samples) == [Filling("b", ready_s=1.0, filled_s=None, migrations=2)]


def test_where_no_other_has_requests_there_is_no_share() -> None:
    samples = [sample(0, a=0), sample(1, a=0, b=0), sample(2, a=0, b=3)]
    assert fillings_of(samples)[0].filled_s is None


def test_each_that_comes_is_measured_against_the_mean_of_all_others() -> None:
    samples = [
        sample(0, a=8),
        sample(1, a=6, b=3),
        sample(2, a=6, b=4, c=2),
        sample(3, a=4, b=4, c=2),
    ]
    found = fillings_of(samples)
    assert [(each.instance, each.filled_s) for each in found] == [("b", 0.0), ("c", 1.0)]
