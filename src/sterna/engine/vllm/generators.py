"""Seeded sampling on CPU for requests whose prompt is computed in chunks.

vLLM draws a token for every row of a batch, also for a prompt that is not complete yet, and
throws that one away: it turns the request's random generator back by an offset, which only CUDA
generators have. On CPU the first seeded request with a prompt of several chunks, or one that is
prefilled again in chunks after a preemption or a migration, would end the engine.
"""

from typing import Any

import numpy as np


def keep_generators_of_incomplete_prompts(model_runner: Any) -> None:
    """Have the runner sample the rows whose token is thrown away without the request's generator.

    The generator is then where it should be: not advanced. For CPU runners, once.
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
