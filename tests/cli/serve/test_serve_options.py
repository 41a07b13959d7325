"""What `sterna serve` makes of its own options, and how it refuses values that cannot work."""

import argparse

import pytest

from sterna.cli.serve.serve_options import add_serve_options, cluster_config
from sterna.errors import ConfigurationError
from sterna.priority_classes import DEFAULT_CLASSES


def parsed(*options: str) -> argparse.Namespace:
    """Sterna's own options, for instances that take no memory and no GPU of this machine."""
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    args = parser.parse_args(options)
    args.classes, args.emulated = DEFAULT_CLASSES, object()
    return args


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--cpus-per-instance", "-1", "at least 0, not -1.0"),
        ("--drain-timeout", "0", "positive, not 0.0"),
        ("--frontends", "0", "at least 1, not 0"),
        ("--instance-lease", "1", "at least 2 seconds, not 1.0"),
        ("--instance-timeout", "0.5", "at least 1 second, not 0.5"),
        ("--instances", "0", "at least 1, not 0"),
        ("--max-queued-requests", "-1", "at least 0, not -1"),
        ("--migration-bandwidth-share", "2", "in (0, 1], not 2.0"),
        ("--migration-concurrency", "0", "at least 1, not 0"),
        ("--migration-interval", "0", "positive, not 0.0"),
        ("--migration-threshold", "nan", "at most destination_freeness_steps (nan), not nan"),
        ("--reader-timeout", "0", "positive, not 0.0"),
        ("--resume-window", "0", "positive, not 0.0"),
        ("--step-timeout", "0", "at least 1 second, not 0.0"),
        ("--warm-instances", "-1", "at least 0, not -1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_options_name(
    option: str, value: str, rule: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        cluster_config(parsed(option, value))
    assert str(refused.value) == f"{option} must be {rule}"


def test_what_auto_scaling_refuses_it_refuses_by_the_options_names() -> None:
    with pytest.raises(ConfigurationError) as refused:
        cluster_config(parsed("--max-instances", "8", "--instances", "9"))
    words = "--instances must be between --min-instances (1) and --max-instances (8), not 9"
    assert str(refused.value) == words
