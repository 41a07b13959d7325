"""Servers with several front ends and with a key."""

from collections.abc import Iterator

import openai
import pytest

from tests.serve.resuming import connected, front_ends
from tests.serve.server import MODEL_NAME, ServerProcess, start_sterna, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

KEY = "a secret"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = start_sterna(
        *("--frontends", "3", "--api-key", KEY, "--no-migration", "--no-enable-prefix-caching")
    )
    yield server
    server.end()


def test_three_front_ends_on_one_port_all_answer_and_all_say_the_same(
    server: ServerProcess,
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": MODEL_NAME, "prompt": "The arctic tern", "max_tokens": 8, "temperature": 0}
    every = front_ends(server)
    assert len(every) == 3
    answers = set()
    for each in every:
        with connected(server, each) as http:
            answer = http.post("/v1/completions", json=body, headers=headers)
            answers.add(answer.json()["choices"][0]["text"])
    assert len(answers) == 1
    with server.http(headers=headers) as http:
        samples = http.get("/metrics").text.splitlines()
    (served,) = [
        float(line.rsplit(" ", 1)[1])
        for line in samples
        if line.startswith("vllm:request_success_total{") and 'finished_reason="length"' in line
    ]
    # Whichever of them is asked knows what all have served.
    assert served == 3


def test_several_front_ends_list_all_requests(server: ServerProcess) -> None:
    streams = [server.stream(api_key=KEY) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    assert len(server.requests(KEY)) == 4
    for stream in streams:
        stream.close()
    until(lambda: not server.requests(KEY), "aborted requests are gone")


@pytest.mark.parametrize("key", ["", "wrong"])
def test_without_its_key_nothing_is_answered(server: ServerProcess, key: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key=key or "none").completions.create(
            model=MODEL_NAME, prompt="Terns", max_tokens=3
        )
    with server.http(headers={"Authorization": f"Bearer {key}"} if key else {}) as http:
        assert http.get("/admin/instances").status_code == 401
        assert http.get("/health").status_code == 200
