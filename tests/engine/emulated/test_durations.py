"""Durations of steps and copies; every example computed by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime, whole_nanoseconds
from sterna.engine.emulated.profiles import PROFILES, RTX4090_LLAMA_31_8B
from sterna.errors import ConfigurationError
from tests.engine.emulated.builders import STEP_TIME, add, chunked, engine, request, step, steps


def test_a_prefill_takes_time_for_its_tokens_and_their_pairs() -> None:
    """By hand: 0.01 + 12 x 0.001 + (8^2 + 4^2) x 0.0001 = 0.03 s. The pairs are those of each
    prompt, not of all tokens together."""
    core = engine()
    add(core, request("a", 8), request("b", 4))
    assert step(core).duration_s == pytest.approx(0.03)


def test_a_small_prefill_takes_the_least_time() -> None:
    """By hand: 0.01 + 0.004 + 0.0016 is less than 0.03 s."""
    core = engine()
    add(core, request("a", 4))
    assert step(core).duration_s == 0.03


def test_a_decode_takes_time_for_its_requests_and_their_tokens() -> None:
    """By hand: 0.02 + 2 x 0.002 + (9 + 5) x 0.0005 = 0.031 s, then 2 tokens more."""
    core = engine()
    add(core, request("a", 8), request("b", 4))
    second, third = steps(core, 3)[1:]
    assert second.duration_s == pytest.approx(0.031)
    assert third.duration_s == pytest.approx(0.032)


def test_a_mixed_step_computes_prompts_while_it_reads_the_weights() -> None:
    """By hand, where reading takes 0.02 - 0.01 s more than a prefill's start: a chunk of 15 next to
    a decode of 5 tokens adds 0.015 - 0.01 and 15^2 x 0.0001 to 0.02 + 0.002 + 0.0025. Of the next 5
    only the pairs show, 5^2 + 2 x 5 x 15."""
    core = chunked(max_num_batched_tokens=16)
    add(core, request("a", 4))
    step(core)
    add(core, request("b", 20, arrival_s=1.0))
    assert step(core).duration_s == pytest.approx(0.0245 + 0.005 + 0.0225)
    assert step(core).duration_s == pytest.approx(0.025 + 0.0175)


def test_decodes_leave_prompts_less_of_the_time_in_which_weights_are_read() -> None:
    """By hand: 0.01 s for products of prompts, but each decode, which makes the step longer by
    0.0005, has products of 0.001 as well: 8 leave 0.006, and 20 or 30 nothing."""
    step_time = replace(STEP_TIME, decode_request_s=0.0005)
    assert step_time.duration_s(16, 0, 8, 0) == pytest.approx(0.02 + 0.004 + 0.01)
    assert step_time.duration_s(16, 0, 20, 0) == pytest.approx(0.02 + 0.01 + 0.016)
    assert step_time.duration_s(16, 0, 30, 0) == pytest.approx(0.02 + 0.015 + 0.016)


def test_a_mixed_step_is_no_shorter_than_its_prompts_alone() -> None:
    """Also where these take the least time of a prefill, which is more than the decode's."""
    assert STEP_TIME.duration_s(1, 1, 1, 1) == STEP_TIME.duration_s(1, 1, 0, 0) == 0.03


@pytest.mark.parametrize("step_time", [each.step_time for each in PROFILES.values()], ids=PROFILES)
def test_a_step_of_one_kind_is_what_was_fitted(step_time: StepTime) -> None:
    """To the last bit, also of batches so large that products would take longer than the weights:
    results of the paper's engine, which mixes nothing, depend on it."""
    start_s, token_s, pair_s, min_s, decode_s, request_s, kv_token_s = step_time.constants
    for num in (1, 7, 128, 256, 1_024, 4_096, 100_000):
        prompts_s = token_s * num + pair_s * num**2
        assert step_time.duration_s(num, num**2, 0, 0) == max(min_s, start_s + prompts_s)
        batch_s = decode_s + request_s * num + kv_token_s * (37 * num)
        assert step_time.duration_s(0, 0, num, 37 * num) == batch_s


def test_a_decode_in_place_of_a_prompts_token_hardly_changes_the_step() -> None:
    """By hand, in ms: 2.97 + 256 x 0.0874 + 0.17 = 25.5, measured 25.5; adding the prompt's work to
    the decode's 17.0 would make it 39.5. The decode has 256 tokens in its cache."""
    step_time = RTX4090_LLAMA_31_8B.step_time
    prefill_s = step_time.duration_s(256, 256**2, 0, 0)
    mixed_s = step_time.duration_s(255, 255**2, 1, 256)
    assert mixed_s == pytest.approx(prefill_s, rel=0.1)


constants = st.floats(0.0, 0.1)
step_times = st.sampled_from([each.step_time for each in PROFILES.values()]) | st.builds(
    StepTime,
    *(constants, constants, constants, st.floats(0.001, 0.1)),
    *(st.floats(0.001, 0.1), constants, constants),
)


@settings(max_examples=60)
@given(step_times, *(st.integers(0, 2_000) for _ in range(4)))
def test_a_step_is_the_longer_the_more_it_computes(
    step_time: StepTime, num_tokens: int, num_before: int, num_decodes: int, num_context: int
) -> None:
    """One token more of the prompt, or one decode more. Sums of numbers that differ by their order
    alone may differ in the last bits."""

    def duration_s(num_tokens: int, num_decodes: int) -> float:
        num_pairs = num_tokens * (num_tokens + 2 * num_before)
        return step_time.duration_s(num_tokens, num_pairs, num_decodes, num_context * num_decodes)

    shorter_s = duration_s(num_tokens, num_decodes) * (1 - 1e-12)
    if num_tokens + num_decodes > 0:
        assert duration_s(num_tokens + 1, num_decodes) >= shorter_s
        assert duration_s(num_tokens, num_decodes + 1) >= shorter_s


def test_the_pairs_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    """7 + 3 tokens have 49 + 9 + 42 = 10^2 pairs."""
    no_minimum = replace(STEP_TIME, prefill_min_s=0.001)
    whole_s = no_minimum.duration_s(10, 100, 0, 0)
    chunks_s = no_minimum.duration_s(7, 49, 0, 0) + no_minimum.duration_s(3, 9 + 42, 0, 0)
    assert chunks_s - no_minimum.prefill_s == pytest.approx(whole_s)


def test_a_recomputation_takes_as_long_as_a_prompt_of_its_length() -> None:
    core, other = engine(), engine()
    core.reserve("m", 0, needs_slot=False)
    core.adopt("m", request("a", 20, num_output_tokens=10), 0)
    add(other, request("a", 30))
    assert step(core).duration_s == step(other).duration_s == pytest.approx(0.04 + 0.09)


def test_a_stage_takes_time_for_itself_and_its_blocks() -> None:
    assert CopyTime(block_s=0.003, stage_s=0.005).stage_duration_s(4) == pytest.approx(0.017)


def test_nanoseconds_are_rounded() -> None:
    assert whole_nanoseconds(0.0338) == 33_800_000
    assert whole_nanoseconds(1.4e-9) == 1
    assert whole_nanoseconds(1.6e-9) == 2


# --------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("watermark", -0.1),
        ("watermark", 1.0),
    ],
)
def test_an_engine_that_cannot_be_is_refused(option: str, value: float) -> None:
    options = {"num_blocks": 100, option: value}
    with pytest.raises(ConfigurationError, match=f"{option} must be .*, not {value!r}"):
        EmulatedEngineConfig(**options)  # type: ignore[arg-type]


def test_an_engine_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="usable"):
        EmulatedEngineConfig(num_blocks=1, keeps_block_free=True, watermark=0.0)


def test_the_engine_of_the_paper_has_792_blocks_of_16_tokens() -> None:
    """LLaMA-7B on an A10: 1 % of the blocks are the watermark's 7; M is the rest."""
    config = EmulatedEngineConfig(num_blocks=792)
    assert config.watermark_blocks == 7
    assert config.total_tokens == 785 * 16
    assert [config.blocks_of(each) for each in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_the_block_that_is_never_used_is_no_memory_for_requests() -> None:
    """vLLM 0.1 keeps the last free block; where the watermark keeps one already, it is that."""
    for keeps_block_free, num_usable_blocks in ((True, 39), (False, 40)):
        config = EmulatedEngineConfig(num_blocks=40, keeps_block_free=keeps_block_free)
        assert config.watermark_blocks == 0
        assert config.num_usable_blocks == num_usable_blocks
    assert EmulatedEngineConfig(num_blocks=100).num_usable_blocks == 99


@pytest.mark.parametrize(
    "option", ["prefill_s", "prefill_token_s", "prefill_pair_s", "decode_s", "decode_token_s"]
)
def test_a_negative_constant_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        replace(STEP_TIME, **{option: -0.001})


def test_a_step_takes_time() -> None:
    """Else virtual time would stand still."""
    for options in ({"decode_s": 0.0}, {"prefill_s": 0.0, "prefill_min_s": 0.0}):
        with pytest.raises(ConfigurationError, match="must take time"):
            replace(STEP_TIME, **options)
    for options in ({"block_s": 0.0, "stage_s": 1.0}, {"block_s": 1.0, "stage_s": 0.0}):
        with pytest.raises(ConfigurationError, match="must be positive"):
            CopyTime(**options)


def test_the_constants_are_in_the_order_of_the_fields() -> None:
    """The compiled step time takes them by place."""
    numbered = StepTime(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert numbered.constants == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
