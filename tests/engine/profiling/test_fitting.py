"""Step times are found again from points that they made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.engine.emulated.durations import StepTime
from sterna.engine.profiling.fitting import (
    DecodePoint,
    FitErrors,
    PrefillPoint,
    fit_decode,
    fit_step_time,
)
from sterna.errors import ConfigurationError

TRUE = StepTime(
    prefill_s=5e-3,
    prefill_token_s=2e-4,
    prefill_pair_s=5e-9,
    prefill_min_s=3e-2,
    decode_s=3e-2,
    decode_request_s=5e-4,
    decode_token_s=1e-6,
)


def prefills(*lengths: int, step_time: StepTime = TRUE) -> list[PrefillPoint]:
    return [PrefillPoint(n, step_time.duration_s(n, n * n, 0, 0)) for n in lengths]


def decodes(*batches: tuple[int, int], step_time: StepTime = TRUE) -> list[DecodePoint]:
    return [DecodePoint(n, tokens, step_time.duration_s(0, 0, n, tokens)) for n, tokens in batches]


BATCHES = decodes((1, 100), (8, 8000), (32, 3000), (64, 20000))


def constants(step_time: StepTime) -> list[float]:
    return [pytest.approx(each, rel=1e-6) for each in step_time.constants]


def test_the_step_time_that_made_the_points_is_found() -> None:
    fit = fit_step_time(prefills(16, 32, 64, 256, 1024, 4096), BATCHES)

    assert list(fit.step_time.constants) == constants(TRUE)
    assert max(fit.prefill.max, fit.decode.max) < 1e-9


def test_the_order_of_the_points_does_not_matter() -> None:
    points = prefills(16, 32, 64, 256, 1024, 4096)

    there, back = fit_step_time(points, BATCHES), fit_step_time(points[::-1], BATCHES[::-1])

    assert list(back.step_time.constants) == constants(there.step_time)
    assert back.prefill.relative == pytest.approx(there.prefill.relative[::-1])


def test_without_short_prompts_the_floor_is_a_decode_of_one_request() -> None:
    fit = fit_step_time(prefills(256, 512, 1024, 4096), BATCHES)

    assert fit.step_time.prefill_min_s == pytest.approx(TRUE.decode_s + TRUE.decode_request_s)
    assert fit.step_time.prefill_token_s == pytest.approx(TRUE.prefill_token_s)


def chunks(size: int, *before: int, step_time: StepTime = TRUE) -> list[PrefillPoint]:
    """Steps of one prompt, each of so many tokens after so many others."""
    return [
        PrefillPoint(size, step_time.duration_s(size, size * (size + 2 * each), 0, 0), each)
        for each in before
    ]


def test_chunks_of_a_prompt_tell_what_a_pair_of_tokens_costs() -> None:
    """The last points are all of one size: no fit can begin at them."""
    points = [*prefills(16, 32, 64, 256, 512), *chunks(512, 512, 1024, 1536)]

    fit = fit_step_time(points, BATCHES)

    assert list(fit.step_time.constants) == constants(TRUE)
    assert fit.prefill.max < 1e-9


def test_chunks_of_one_size_alone_determine_nothing() -> None:
    with pytest.raises(ConfigurationError, match="the prefill points do not determine 3 constants"):
        fit_step_time(chunks(512, 0, 512, 1024, 1536), BATCHES)


def test_one_short_prompt_is_no_evidence_of_a_floor() -> None:
    """A floor of its own would meet any first point exactly."""
    slower_first = [PrefillPoint(256, 0.06), *prefills(512, 1024, 2048, 4096)]

    fit = fit_step_time(slower_first, BATCHES)

    assert fit.step_time.prefill_min_s == pytest.approx(TRUE.decode_s + TRUE.decode_request_s)
    assert fit.prefill.max > 1e-3


def test_decodes_of_one_total_length_need_the_bytes_of_a_token() -> None:
    """The artifact's decodes all have 8,192 tokens in their caches."""
    points = decodes((32, 8192), (16, 8192), (1, 8192))
    ratio = TRUE.decode_token_s / TRUE.decode_s

    with pytest.raises(ConfigurationError, match="the decode points do not determine 3 constants"):
        fit_step_time(prefills(256, 512, 1024, 4096), points)
    fit = fit_step_time(prefills(256, 512, 1024, 4096), points, kv_per_weights=ratio)

    assert list(fit.step_time.constants)[4:] == constants(TRUE)[4:]


def test_no_constant_becomes_negative() -> None:
    """These prefills bend downwards: the best curve of all would have a negative square."""
    bent = [PrefillPoint(n, 1e-3 * n**0.8) for n in (64, 256, 1024, 4096)]

    fit = fit_step_time(bent, BATCHES)

    assert min(fit.step_time.constants) >= 0
    assert fit.step_time.prefill_pair_s == 0
    assert fit.prefill.max > 0.05


def test_short_and_long_points_count_alike() -> None:
    """One point in two off by a tenth, at either end: the fit meets both half way."""
    sizes, factors = (1, 1, 1000, 1000), (0.9, 1.1, 0.9, 1.1)
    points = [
        DecodePoint(size, 0, (1e-2 + 3e-3 * size) * factor)
        for size, factor in zip(sizes, factors, strict=True)
    ]

    decode_s, request_s, _ = fit_decode(points, kv_per_weights=0.0)

    errors = [(decode_s + request_s * each.num_requests) / each.duration_s - 1 for each in points]
    assert errors[:2] == pytest.approx(errors[2:], rel=1e-6)


def test_one_decode_does_not_determine_two_constants() -> None:
    with pytest.raises(ConfigurationError, match="these 1"):
        fit_decode([DecodePoint(16, 0, 0.07)], kv_per_weights=0.0)


def test_errors_are_told_by_their_mean_and_their_largest() -> None:
    errors = FitErrors((-0.3, 0.1, 0.2))

    assert errors.mean == pytest.approx(0.2)
    assert errors.max == 0.3


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(64, 20_000), st.floats(0.01, 0.2)),
        min_size=6,
        max_size=12,
    )
)
def test_no_fit_is_negative_whatever_was_measured(
    points: list[tuple[int, int, float]],
) -> None:
    measured = [DecodePoint(*each) for each in points]
    try:
        fit = fit_step_time(prefills(256, 512, 1024, 4096), measured)
    except ConfigurationError:
        return
    assert min(fit.step_time.constants) >= 0
