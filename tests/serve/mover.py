"""Moves requests of a running server to and fro while they run."""

import random
import threading
from collections import Counter
from types import TracebackType
from typing import Any

from sterna.cli.operate.admin_commands import ServerError, ask
from tests.serve.server import ServerProcess

PACE_S = 0.01


class Mover:
    """While entered, moves every live request to another instance at random points.

    Args:
        seed: chooses the points; a test gives its case's name.
        num_threads: how many moves go on side by side.
    """

    def __init__(self, server: ServerProcess, seed: str, num_threads: int = 1) -> None:
        self._url = server.url
        self._seed = seed
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._next_move: dict[str, int] = {}
        self._moving: set[str] = set()
        self.num_moves: Counter[str] = Counter()
        """Moves of each request, by the engine's id."""
        self.refusals: list[str] = []
        self.failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(num_threads)
        ]

    @property
    def total(self) -> int:
        """All moves so far."""
        return sum(self.num_moves.values())

    def __enter__(self) -> "Mover":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self.failure is not None and error is None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
                self._stop.wait(PACE_S)
        except BaseException as error:
            self.failure = error

    def _round(self) -> None:
        for request in ask(self._url, "GET", "/admin/requests", None):
            if self._stop.is_set():
                return
            if self._claim(request):
                self._move(request)

    def _claim(self, request: dict[str, Any]) -> bool:
        """Whether this thread is to move the request at this point."""
        request_id = request["id"]
        with self._lock:
            first = self._random.randint(1, 6)
            if request_id in self._moving:
                return False
            if request["num_output_tokens"] < self._next_move.setdefault(request_id, first):
                return False
            self._moving.add(request_id)
            distance = self._random.randint(1, 12)
            self._next_move[request_id] = request["num_output_tokens"] + distance
        return True

    def _move(self, request: dict[str, Any]) -> None:
        request_id = request["id"]
        others = [
            each["id"]
            for each in ask(self._url, "GET", "/admin/instances", None)
            if each["id"] != request["instance"]
        ]
        try:
            with self._lock:
                destination = self._random.choice(others)
            body = {"request": request_id, "to": destination}
            ask(self._url, "POST", "/admin/migrate", None, body)
            with self._lock:
                self.num_moves[request_id] += 1
        except ServerError as error:
            # It ended meanwhile, say; the test asserts that enough were moved.
            self.refusals.append(str(error))
        finally:
            with self._lock:
                self._moving.discard(request_id)
