"""Clients: their requests, the front ends that they ask, and the clients that go away."""

from random import Random

from fault_simulation.adversary.stream_clients import StreamClient
from fault_simulation.oracle.token_oracle import Ask
from fault_simulation.processes.frontends import FrontendProcess
from fault_simulation.processes.ray import Platform
from fault_simulation.virtual import settings
from sterna.types import HIGH, NORMAL, RequestId


class Clients:
    """The clients of one cluster: they send requests for some time, in bursts."""

    def __init__(
        self, platform: Platform, num_requests: int, from_s: float, until_s: float
    ) -> None:
        self._platform = platform
        self._world = platform.world
        self.num_to_come = num_requests
        self._num_asked = 0
        rng = self._rng
        num_bursts = rng.randint(1, 4)
        bursts_s = [rng.uniform(from_s, until_s) for _ in range(num_bursts)]
        for _ in range(num_requests):
            is_in_burst = rng.random() < 0.5
            time_s = rng.choice(bursts_s) if is_in_burst else rng.uniform(from_s, until_s)
            self._world.timeline.push(time_s, None, "", self._ask)

    @property
    def _rng(self) -> Random:
        return self._world.rng

    def _ask(self) -> None:
        """Send a request to any front end that accepts connections; else try again soon."""
        rng = self._rng
        frontend = self._platform.open_frontend()
        if frontend is None:
            self._world.timeline.push(0.1, None, "", self._ask)
            return
        self.num_to_come -= 1
        request_id = RequestId(f"r{self._num_asked}")
        self._num_asked += 1
        is_long = rng.random() < 0.15
        ask = Ask(
            request_id=request_id,
            frontend_id=frontend.frontend_id,
            prompt_tokens=rng.randint(1, 60 if is_long else 20),
            output_tokens=rng.randint(1, 90 if is_long else 40),
            arrival_s=self._world.timeline.now_s,
            priority=HIGH if rng.random() < 0.2 else NORMAL,
            salt=None if rng.random() < settings.UNSEEDED_SHARE else rng.getrandbits(32),
            is_immovable=self._world.immovables.draw(),
        )
        timeline = self._world.timeline
        if self._world.streams is not None:
            self._begin_stream(frontend, ask)
            return
        self._world.ledger.accept(ask, frontend.name, timeline.now_s)
        timeline.push(0.0, frontend, f"accepts {request_id}", lambda: frontend.on_client(ask))
        if rng.random() < 0.12:
            delay_s = rng.expovariate(1.0) * 0.5
            timeline.push(
                delay_s,
                frontend,
                f"{request_id} is aborted",
                lambda: frontend.on_client_gone(request_id),
            )

    def _begin_stream(self, frontend: FrontendProcess, ask: Ask) -> None:
        assert self._world.streams is not None
        client = StreamClient(self._platform, self._world.streams, ask)
        client.begin(frontend)
        if self._rng.random() < 0.12:
            delay_s = self._rng.expovariate(1.0) * 0.5
            self._world.timeline.push(delay_s, None, "", client.leave)
