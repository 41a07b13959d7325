"""Servers that dispatch by what the instances have in their prefix caches."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sterna.cli.operate.admin_commands import ServerError
from tests.serve.server import (
    ServerProcess,
    start_emulated,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_SESSIONS = 6
SHARED_TOKENS = 256
"""Of each turn of a session, at its beginning: whole blocks of either engine."""

OPTIONS = ("--policy", "llm-d", "--enable-prompt-tokens-details", "--enable-prefix-caching")


@pytest.fixture(scope="module", params=["vllm", "emulated"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    if request.param == "vllm":
        server = start_sterna("--instances", "2", *OPTIONS)
    else:
        server = start_emulated(
            *("--instances", "3", "--profile", "rtx4090-llama-3.1-8b", *OPTIONS)
        )
    yield server
    server.end()


def cached_tokens(server: ServerProcess, session: int, turn: int) -> int:
    """Of a turn of the session, what its instance had in its cache."""
    prompt = [1000 + session] * SHARED_TOKENS + [2000 + turn] * (turn + 1)
    client = server.client()
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=4)
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else int(details.cached_tokens or 0)


def dispatched(server: ServerProcess, name: str) -> dict[str, Any]:
    """What `sterna explain` says of the request's only dispatch."""
    (history,) = httpx.get(f"{server.url}/admin/explain?request={name}", timeout=60).json()
    (event,) = [each for each in history["events"] if each["event"] == "dispatched"]
    return dict(event)


def hits_on_metrics(server: ServerProcess) -> list[float]:
    """Tokens that were found in prefix caches: by vLLM's counter, and by the instances' gauges."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
        for name in ("vllm:prefix_cache_hits_total", "sterna_instance_prefix_hit_tokens")
    ]


def test_each_turn_of_a_session_goes_where_the_last_one_was(server: ServerProcess) -> None:
    """Also when another scheduler has taken over, which gets all that the caches have."""
    first = [cached_tokens(server, session, 0) for session in range(NUM_SESSIONS)]
    assert first == [0] * NUM_SESSIONS
    later = [cached_tokens(server, session, 1) for session in range(NUM_SESSIONS)]
    assert later == [SHARED_TOKENS] * NUM_SESSIONS
    hits = [SHARED_TOKENS * NUM_SESSIONS] * 2
    until(lambda: hits_on_metrics(server) == hits, "the metrics show the hits")
    num_instances = len(server.instances())
    scheduler = server.at_work("ray::_SchedulerActor")[0]
    scheduler.kill()

    def is_replaced() -> bool:
        try:
            reporting = [each for each in server.instances() if each.get("total_tokens")]
        except ServerError:
            # There is none at the moment.
            return False
        return scheduler not in server.at_work("ray::_SchedulerActor") and (
            len(reporting) == num_instances
        )

    until(is_replaced, "another scheduler knows all instances")
    last = [cached_tokens(server, session, 2) for session in range(NUM_SESSIONS)]
    assert last == [SHARED_TOKENS] * NUM_SESSIONS


PREFIX = [1000 + place % 997 for place in range(12_000)]
"""Whole blocks; to compute it takes longer than to copy it."""


@pytest.fixture
def small_server() -> Iterator[ServerProcess]:
    """Sterna's policy, and two instances with memory for two such prompts each."""
    server = start_emulated(
        *("--instances", "2", "--profile", "rtx4090-llama-3.1-8b", "--enable-prefix-caching"),
        *("--num-gpu-blocks-override", "1700", "--max-model-len", "13000"),
        *("--hf-overrides", '{"max_position_embeddings": 16384}'),
        "--enable-prompt-tokens-details",
    )
    yield server
    server.end()


def test_what_only_another_instance_has_of_a_prompt_is_copied_to_where_there_is_room(
    small_server: ServerProcess,
) -> None:
    """Asked by HTTP: the answer says what was in the cache, and `explain` says why."""
    server = small_server
    model = server.client().models.list().data[0].id
    names = [f"copy{number}" for number in range(4)]

    def ask(name: str, max_tokens: int) -> int:
        """The tokens of the prompt that were in the cache of its instance."""
        answer = server.client().completions.create(
            model=model,
            prompt=[*PREFIX, 1000 + names.index(name)],
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": name},
        )
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else int(details.cached_tokens or 0)

    assert ask(names[0], 1) == 0
    with ThreadPoolExecutor(len(names)) as pool:
        cached = list(pool.map(ask, names[1:], [200] * 3))
    assert cached == [len(PREFIX)] * 3
    home = dispatched(server, names[0])["instance"]
    sent = [dispatched(server, name) for name in names[1:]]
    sources = {each["instance"]: each["why"]["prefix_from"] for each in sent}
    assert sources == {name: None if name == home else home for name in ("i0", "i1")}
