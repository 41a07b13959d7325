"""Refusals of `sterna simulate`, and their words."""

from collections.abc import Sequence

import pytest

from sterna.cli.main import main
from tests.cli.simulate.simulations import simulate


def error_line(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that the command fails with."""
    assert simulate(*options) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sterna: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("sterna: error: ").rstrip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "lumnix"), "not 'lumnix'; did you mean llumnix?"),
        (("--policy", "llumnix:victm=longest"), "no setting 'victm'; did you mean victim?"),
        (("--policy", "llumnix:longest"), "a setting must be key=value, not 'longest'"),
        (("--policy", "llumnix:bandwidth=0"), "bandwidth must be positive tokens a second"),
        (("--trace", "M-N"), "no trace is called 'M-N'"),
        (("--trace", "absent.csv"), "absent.csv"),
        (("--arrivals", "gama:2"), "arrivals must be poisson, gamma:CV"),
        (("--profile", "a100"), "profile must be one of a10-llama-7b"),
        (("--victim", "shortst"), "--victim must be shortest or longest or last-started"),
        (("--interval", "-1"), "round_interval_s must be positive, not -1.0"),
        (("--set", "round_intervl_s=1"), "did you mean round_interval_s?"),
        (("--set", "scaling_begins_s=inf"), "scaling_begins_s must be finite, not 'inf'"),
        (("--start-delay", "inf"), "--start-delay must be finite, not 'inf'"),
        (("--scale-low", "1"), "--scale-low needs auto-scaling"),
        (("--auto-scaling", "5:2"), "max_instances must be at least min_instances (5), not 2"),
        (
            ("--auto-scaling", "1:4", "--instances", "5"),
            "--instances must be within auto-scaling's bounds (1 to 4), not 5",
        ),
        (("--source-threshold", "100"), "source_freeness_steps must be at most"),
        (("--plot", "plot.jpg"), "--plot must end in .png, .svg, .pdf, not 'plot.jpg'"),
        (("--plot", "absent/plot.png"), "there is no folder absent"),
        (("--plot", "/proc/plot.png"), "--plot /proc/plot.png cannot be written: "),
        (("--baseline", "infaas++"), "--baseline must be one of the policies that run (sterna)"),
        (("--paper", "--profile", "a10-llama-7b"), "leave --profile out"),
        (("--paper", "--policy", "sterna"), "infaas++, round-robin, not 'sterna'"),
        (("--max-total-tokens", "1"), "token"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_line(capsys, *options)


def test_arrivals_that_are_named_are_not_replaced_by_those_of_the_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--trace", "azure-conv", "--arrivals", "poisson"]) == 1
    assert "azure-conv with poisson arrivals needs a rate" in capsys.readouterr().err


def test_a_rate_that_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "M-M"]) == 1
    assert "needs a rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "0"), "argument --rate: invalid positive number value: '0'"),
        (("--rate", "nan"), "argument --rate: invalid positive number value: 'nan'"),
        (("--requests", "0"), "argument --requests: invalid count (1 or more) value: '0'"),
        (("--instances", "few"), "argument --instances: invalid count (1 or more) value: 'few'"),
        (("--seed", "-1"), "argument --seed: "),
        (("--seed", "5000000000"), "argument --seed: invalid seed (0 to 2^32 - 1) value"),
        (("--high-fraction", "1.5"), "invalid fraction (0 to 1) value: '1.5'"),
        (("--auto-scaling", "4"), "argument --auto-scaling: invalid MIN:MAX value: '4'"),
        (("--polcy", "llumnix"), "unrecognized arguments: --polcy"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_as_by_any_command(
    options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate(*options)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


def test_a_plot_with_a_wrong_suffix_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else this would take minutes."""
    assert main(["simulate", "--rate", "100", "--requests", "9000000", "--plot", "x.bmp"]) == 1
    assert "--plot must end in" in capsys.readouterr().err
