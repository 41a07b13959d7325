"""Random draws of requests: generators of vLLM's V1 model runner, seeds of V2.

**In chunked prefills, on CPU**: vLLM draws a token for every row of a batch, also for an incomplete
prompt, and discards that one: it sets the request's random generator back by an offset, which only
CUDA generators have. On CPU the first seeded request with a prompt of several chunks, or one that
is prefilled again in chunks after a preemption or a migration, would end the engine.

**After the death of their engine**: a generator is made from the seed again, and repeats the draws
of the first one. The amount drawn for a token depends on vLLM's sampler, so the sampler itself
draws, on arbitrary logits.

**V2** has no generators: a draw depends on the request's seed and on the token's position. A
request without a seed gets one of the worker's choice.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner


def keep_generators_of_incomplete_prompts(model_runner: "V1Runner") -> None:
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


def generator_after(model_runner: "V1Runner", seed: int, num_draws: int) -> torch.Generator:
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


def drawn_seed(model_runner: "V2Runner", request_id: str) -> int | None:
    """Return the seed that vLLM's V2 runner chose for a request without one.

    None where the request has no row (it queues, or has not been computed yet), and where a fused
    sampler may draw: that one ignores chosen seeds, and is not used for a batch with a given one.
    """
    row = model_runner.req_states.req_id_to_index.get(request_id)
    sampler: Sampler = model_runner.sampler
    if row is None or sampler.use_flashinfer or sampler.use_xpu_sampler:
        return None
    return int(sampler.sampling_states.seeds.np[row])


def _draw(model_runner: "V1Runner", generator: torch.Generator, vocab_size: int) -> None:
    logits = torch.zeros((1, vocab_size), dtype=torch.float32, device=model_runner.device)
    model_runner.sampler.topk_topp_sampler(logits, {0: generator}, None, None)


def _is_same_with_one_logit(
    model_runner: "V1Runner", seed: int, drawn_once: torch.Generator
) -> bool:
    """Whether the amount drawn for a token does not depend on the size of the vocabulary."""
    other = torch.Generator(device=model_runner.device)
    other.manual_seed(seed)
    _draw(model_runner, other, 1)
    return torch.equal(other.get_state(), drawn_once.get_state())
