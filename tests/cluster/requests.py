"""Builds engine requests as vLLM's own front end does."""

import itertools
import random
from argparse import Namespace
from copy import copy
from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

PROMPTS = (
    "The arctic tern flies farther than any other animal because",
    "Once upon a time in a small village by the sea there lived",
    "def quicksort(values):\n    ",
    "The three most important inventions of the nineteenth century are",
)


def random_prompt(num_tokens: int, *, seed: int) -> list[int]:
    """Return a prompt of so many tokens without any meaning."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


class RequestBuilder:
    """Makes requests with ids of their own."""

    def __init__(self, args: Namespace) -> None:
        from sterna.engine.vllm.hosted_core import engine_config

        config = engine_config(args)
        self._processor = InputProcessor(config)
        self._numbers = itertools.count()
        self.tokenizer: Any = self._processor.get_tokenizer()

    def __call__(
        self,
        prompt: str | list[int] | dict[str, Any],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **sampling: Any,
    ) -> EngineCoreRequest:
        """Return a request for the prompt with these sampling parameters; greedy by default.

        Args:
            prompt: a text, tokens, or a prompt as vLLM's front end takes it.
        """
        if isinstance(structured := sampling.get("structured_outputs"), dict):
            sampling["structured_outputs"] = StructuredOutputsParams(**structured)
        sampling.setdefault("temperature", 0.0)
        sampling.setdefault("max_tokens", 48)
        if isinstance(prompt, dict):
            whole = prompt
        else:
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            whole = dict(TokensPrompt(prompt_token_ids=token_ids))
        if cache_salt is not None:
            whole["cache_salt"] = cache_salt
        request: EngineCoreRequest = self._processor.process_inputs(
            f"r{next(self._numbers)}",
            whole,
            SamplingParams(**sampling),
            ("generate",),
            priority=priority,
            lora_request=lora_request,
        )
        return request

    def children(self, prompt: str, num: int, **sampling: Any) -> list[EngineCoreRequest]:
        """Return the requests that vLLM's front end makes of one with `n`."""
        request = self(prompt, n=num, **sampling)
        request.external_req_id = request.request_id
        parent = ParentRequest(request)
        children = []
        for index in range(num):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            children.append(child)
        return children
