"""Builds engine requests as vLLM's own front end does."""

import itertools
from argparse import Namespace
from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

PROMPTS = (
    "The arctic tern flies farther than any other animal because",
    "Once upon a time in a small village by the sea there lived",
    "def quicksort(values):\n    ",
    "The three most important inventions of the nineteenth century are",
)


class RequestBuilder:
    """Makes requests with ids of their own."""

    def __init__(self, args: Namespace) -> None:
        from sterna.engine.vllm.core import engine_config

        config = engine_config(args)
        self._processor = InputProcessor(config)
        self._numbers = itertools.count()
        self.tokenizer: Any = self._processor.get_tokenizer()

    def __call__(
        self, prompt: str | list[int], *, priority: int = 0, **sampling: Any
    ) -> EngineCoreRequest:
        """Return a request for the prompt with these sampling parameters; greedy by default."""
        sampling.setdefault("temperature", 0.0)
        sampling.setdefault("max_tokens", 48)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request: EngineCoreRequest = self._processor.process_inputs(
            f"r{next(self._numbers)}",
            TokensPrompt(prompt_token_ids=token_ids),
            SamplingParams(**sampling),
            ("generate",),
            priority=priority,
        )
        return request
