"""Random generators of seeded requests.

**In chunked prefills, on CPU**: vLLM draws a token for every row of a batch, also for an incomplete
prompt, and discards that one: it sets the request's random generator back by an offset, which only
CUDA generators have. On CPU the first seeded request with a prompt of several chunks, or one that
is prefilled again in chunks after a preemption or a migration, would end the engine.

**After the death of their engine**: a generator is made from the seed again, and repeats the draws
of the first one. The amount drawn for a token depends on vLLM's sampler, so the sampler itself
draws, on arbitrary logits.
"""

from typing import Any

import numpy as np
import torch


def keep_generators_of_incomplete_prompts(model_runner: Any) -> None:
    """Make the runner sample rows whose token is discarded without the request's generator.

    The generator then does not advance. For CPU runners; to be called once.
    """
    sample_tokens = model_runner.sample_tokens

    def sample_keeping_generators(grammar_output: Any) -> Any:
        batch = model_runner.input_batch
        discarded = np.nonzero(model_runner.discard_request_mask.np[: batch.num_reqs])[0]
        # The batch's sampling metadata refers to the same dictionary.
        kept = {
            row: batch.generators.pop(row) for row in map(int, discarded) if row in batch.generators
        }
        try:
            return sample_tokens(grammar_output)
        finally:
            batch.generators.update(kept)

    model_runner.sample_tokens = sample_keeping_generators


def generator_after(model_runner: Any, seed: int, num_draws: int) -> torch.Generator:
    """Return a seeded request's generator after `num_draws` sampled tokens."""
    generator = torch.Generator(device=model_runner.device)
    generator.manual_seed(seed)
    if num_draws == 0:
        return generator
    vocab_size = model_runner.input_batch.vocab_size
    _draw(model_runner, generator, vocab_size)
    if generator.device.type == "cuda":
        # Its state is a position, which every draw advances by the same amount.
        generator.set_offset(num_draws * generator.get_offset())
        return generator
    if _is_same_with_one_logit(model_runner, seed, generator):
        # One logit takes a ten-thousandth of the time.
        vocab_size = 1
    for _ in range(num_draws - 1):
        _draw(model_runner, generator, vocab_size)
    return generator


def _draw(model_runner: Any, generator: torch.Generator, vocab_size: int) -> None:
    logits = torch.zeros((1, vocab_size), dtype=torch.float32, device=model_runner.device)
    model_runner.sampler.topk_topp_sampler(logits, {0: generator}, None, None)


def _is_same_with_one_logit(model_runner: Any, seed: int, drawn_once: torch.Generator) -> bool:
    """Whether the amount drawn for a token does not depend on the size of the vocabulary."""
    other = torch.Generator(device=model_runner.device)
    other.manual_seed(seed)
    _draw(model_runner, other, 1)
    return torch.equal(other.get_state(), drawn_once.get_state())
