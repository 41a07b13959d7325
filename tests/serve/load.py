"""A load of checked streams on a server of emulated engines, with what its clients saw."""

import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from sterna.cli.serve.emulated_options import plain_vocabulary
from sterna.engine.emulated.tokens import stream_key, token_at
from tests.models import small_model
from tests.serve.server import HANG_TIMEOUT_S, ServerProcess

NUM_TOKENS = 60


@dataclass(slots=True)
class Seen:
    """What clients saw.

    Attributes:
        num_ended: streams that were right from their first token to their last.
        failures: why the others were not.
        longest_wait_s: the longest time without a token, from the sending of a request on, also of
            those that still wait.
    """

    num_ended: int = 0
    failures: list[str] = field(default_factory=list)
    longest_wait_s: float = 0.0


class Load:
    """Within its context, so many clients send one request after another. At its end all of their
    streams end, and were right if no failure has been asked for before."""

    def __init__(
        self, server: ServerProcess, num_clients: int, *, num_tokens: int = NUM_TOKENS
    ) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._vocabulary = plain_vocabulary(small_model())
        self._is_ending = threading.Event()
        self._changed = threading.Condition()
        self._seen = Seen()
        # Since when each client has had no token, while it has a stream.
        self._waits_since_s: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join(HANG_TIMEOUT_S)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "streams hang"
            assert self._seen.failures == []

    def seen(self) -> Seen:
        """Return what was seen since this was last asked for."""
        with self._changed:
            seen, self._seen = self._seen, Seen()
            now_s = time.monotonic()
            waits_s = [now_s - since_s for since_s in self._waits_since_s.values()]
            seen.longest_wait_s = max([seen.longest_wait_s, *waits_s])
            return seen

    def until_ended(self, num_streams: int) -> Seen:
        """Wait until so many more streams have ended, well or not; returns what was seen."""

        def is_enough() -> bool:
            return self._seen.num_ended + len(self._seen.failures) >= num_streams

        with self._changed:
            assert self._changed.wait_for(is_enough, HANG_TIMEOUT_S), "streams hang"
        return self.seen()

    def _run(self, client: int) -> None:
        number = 0
        while not self._is_ending.is_set():
            seed = 1000 * client + number
            number += 1
            with self._changed:
                self._waits_since_s[client] = time.monotonic()
            try:
                failure = self._check(client, seed)
            except Exception as error:
                failure = repr(error)
            with self._changed:
                del self._waits_since_s[client]
                if failure is None:
                    self._seen.num_ended += 1
                else:
                    self._seen.failures.append(failure)
                self._changed.notify_all()

    def _check(self, client: int, seed: int) -> str | None:
        """Read one stream; returns what is wrong with it."""
        body = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": f"Terns, number {seed}",
            "max_tokens": self._num_tokens,
            "seed": seed,
            "stream": True,
            "return_token_ids": True,
        }
        prompt_ids: list[int] = []
        token_ids: list[int] = []
        with (
            self._server.http() as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            for line in answer.iter_lines():
                content = line.removeprefix("data: ")
                if not content or content == "[DONE]":
                    continue
                event: dict[str, Any] = json.loads(content)
                if "error" in event:
                    return str(event["error"])
                now_s = time.monotonic()
                with self._changed:
                    waited_s = now_s - self._waits_since_s[client]
                    self._seen.longest_wait_s = max(self._seen.longest_wait_s, waited_s)
                    self._waits_since_s[client] = now_s
                (choice,) = event["choices"]
                prompt_ids += choice.get("prompt_token_ids") or []
                token_ids += choice.get("token_ids") or []
        key = stream_key(prompt_ids, seed)
        expected = [token_at(key, index, self._vocabulary) for index in range(self._num_tokens)]
        return None if token_ids == expected else f"wrong tokens: {token_ids}"
