"""Request parameters that an engine without a model must refuse. Pure.

Sampling parameters that choose among a model's likely tokens (temperature, top_p, penalties) are
accepted and have no effect: for any values of them one token follows, and all are equally likely.
Parameters whose results a client would read in the answer, or rely on, are refused.
"""

from collections.abc import Mapping
from types import MappingProxyType

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "log probabilities",
        "prompt_logprobs": "log probabilities of the prompt",
        "prompt_logprob_token_ids": "log probabilities of the prompt",
        "logprob_token_ids": "log probabilities",
        "structured_outputs": (
            "structured outputs (response_format, a required or named tool, a grammar)"
        ),
        "logit_bias": "logit_bias",
        "allowed_token_ids": "allowed_token_ids",
        "bad_words": "bad_words",
        "thinking_token_budget": "thinking_token_budget",
        "repetition_detection": "repetition_detection",
        "trace_decode_token_ids": "trace_decode_token_ids",
    }
)
"""Fields of vLLM's SamplingParams, and their names for a client."""


def refusal(prompt: object, sampling_params: object) -> tuple[str, str] | None:
    """The first parameter that cannot be honoured, and why in words; None when all can.

    Args:
        prompt: the prompt as vLLM's front end has rendered it.
        sampling_params: vLLM's SamplingParams.
    """
    kind = prompt.get("type", "token") if isinstance(prompt, Mapping) else "token"
    if kind != "token":
        return "prompt", f"the emulated engine has no model and reads tokens only, not {kind}"
    for name, meaning in _REFUSED.items():
        value = getattr(sampling_params, name, None)
        if value is not None and value != [] and value != {}:
            return name, f"the emulated engine has no model and cannot honour {meaning}"
    return None
