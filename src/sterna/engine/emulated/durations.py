"""Durations of steps and copies, from their contents. Pure.

A prompt of n tokens costs time in n (matrix products) and in the pairs of tokens that attend to
each other, n^2. A decode reads the weights once for the whole batch, costs a little a request,
and reads the KV cache of all its tokens. In a step with both, matrix products of prompts are
computed while the weights are read, and make the step longer where they take more time than that
(the roofline model); attention comes on top. No step with both was measured: its duration follows
from those of prefills and decodes alone.
"""

from dataclasses import dataclass, fields

from sterna.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class StepTime:
    """The constants, in seconds.

    Attributes:
        prefill_s: of a step that only prefills, for any batch.
        prefill_token_s: a token of a prompt.
        prefill_pair_s: a pair of attending tokens: n^2 for a whole prompt, n^2 + 2nc for a chunk
            of n after c tokens.
        prefill_min_s: minimum of a step with tokens of prompts.
        decode_s: of a step that decodes, for any batch.
        decode_request_s: a request in the decoding batch.
        decode_token_s: a token in the KV cache of the decoding batch.
    """

    prefill_s: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_min_s: float
    decode_s: float
    decode_request_s: float
    decode_token_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value < 0:
                raise ConfigurationError(f"{each.name} must be at least 0, not {value!r}")
        if self.decode_s <= 0 or max(self.prefill_s, self.prefill_min_s) <= 0:
            raise ConfigurationError("a step must take time: decode_s and prefill_min_s")

    @property
    def constants(self) -> tuple[float, float, float, float, float, float, float]:
        """The constants in the order in which `step_duration_s` takes them."""
        return (
            self.prefill_s,
            self.prefill_token_s,
            self.prefill_pair_s,
            self.prefill_min_s,
            self.decode_s,
            self.decode_request_s,
            self.decode_token_s,
        )

    def duration_s(
        self, num_prompt_tokens: int, num_pairs: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """The duration of a step; see `step_duration_s`."""
        return step_duration_s(
            *self.constants, num_prompt_tokens, num_pairs, num_decodes, num_context_tokens
        )


def step_duration_s(
    prefill_s: float,
    prefill_token_s: float,
    prefill_pair_s: float,
    prefill_min_s: float,
    decode_s: float,
    decode_request_s: float,
    decode_token_s: float,
    num_prompt_tokens: int,
    num_pairs: int,
    num_decodes: int,
    num_context_tokens: int,
) -> float:
    """Duration of a step in seconds. The compiled kernel uses this function, too.

    A step with prompts and decodes is never shorter than with either alone. Of the products of its
    prompts, those are hidden for which there is time while the weights are read: `decode_s` less
    `prefill_s`, and less the products of decoding tokens, as far as `decode_request_s` does not
    count these already.

    Args:
        num_prompt_tokens: tokens of prompts and chunks.
        num_pairs: their pairs of attending tokens.
        num_decodes: requests of which the step computes one token.
        num_context_tokens: tokens of these requests, the computed one included.
    """
    products_s = prefill_token_s * num_prompt_tokens
    attention_s = prefill_pair_s * num_pairs
    prefill_alone_s = max(prefill_min_s, prefill_s + (products_s + attention_s))
    if num_decodes == 0:
        return prefill_alone_s
    decode_alone_s = decode_s + decode_request_s * num_decodes + decode_token_s * num_context_tokens
    if num_prompt_tokens == 0:
        return decode_alone_s
    uncounted_s = max(0.0, prefill_token_s - decode_request_s) * num_decodes
    hidden_s = max(0.0, decode_s - prefill_s - uncounted_s)
    return max(prefill_alone_s, decode_alone_s + max(0.0, products_s - hidden_s) + attention_s)


def whole_nanoseconds(duration_s: float) -> int:
    """The duration in nanoseconds: as integers, their sums do not depend on the order."""
    return int(duration_s * 1e9 + 0.5)


@dataclass(frozen=True, slots=True)
class CopyTime:
    """The constants, in seconds.

    A stage of n blocks takes `stage_s + n * block_s` when no other copy shares a link with it.

    Attributes:
        block_s: a block.
        stage_s: a stage of any size: gathering, latency, scattering.
    """

    block_s: float
    stage_s: float

    def __post_init__(self) -> None:
        for option in ("block_s", "stage_s"):
            value = getattr(self, option)
            if value <= 0:
                raise ConfigurationError(f"{option} must be positive, not {value!r}")

    def stage_duration_s(self, num_blocks: int) -> float:
        """Duration of a stage of `num_blocks` blocks, alone on its links."""
        return self.stage_s + num_blocks * self.block_s
