"""`sterna serve --policy FILE.py:CLASS`, whole: a class decides; where it fails, its base does."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.emulated.quick import MODEL, quick_server
from tests.serve.server import ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

UNLUCKY = 13
CLASS = f'''
from sterna.policy.own import Policy


class Last(Policy):
    """Requests to the instance of the largest id, which others leave, the longest first."""

    base = "llumnix"

    def dispatch(self, request, instances):
        if request.prompt_tokens == {UNLUCKY}:
            raise ValueError("an unlucky number")
        return max(each.instance_id for each in instances)

    def pair(self, instances):
        first, last = sorted(each.instance_id for each in instances)
        return {{last: first}}

    def victims(self, instance):
        movable = [each for each in instance.running if each.immovable is None]
        return sorted(movable, key=lambda each: -each.num_tokens)[:1]
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("own")
    path = folder / "mine.py"
    path.write_text(CLASS)
    with quick_server(folder, "--instances", "2", "--policy", f"{path}:Last") as server:
        yield server


def history(server: ServerProcess, name: str, num_prompt_tokens: int) -> dict[str, Any]:
    """The events of a request of so many tokens, after its end."""
    body = {"model": MODEL, "prompt": [7] * num_prompt_tokens, "max_tokens": 60, "ignore_eos": True}
    with server.http() as http:
        answered = http.post("/v1/completions", json=body, headers={"X-Request-Id": name})
        assert answered.json()["usage"]["completion_tokens"] == 60
    command = [sys.executable, "-m", "sterna.cli.main", "explain", name, "--url", server.url]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    return {event["event"]: event for event in found["events"]}


def test_a_class_decides_where_requests_go_and_which_move(server: ServerProcess) -> None:
    events = history(server, "plain", 20)
    why = events["dispatched"]["why"]
    assert (why["rule"], why["chosen"]["instance"]) == ("Last", "i1")
    assert (events["moved"]["from"], events["moved"]["to"]) == ("i1", "i0")


def test_where_a_class_fails_its_base_decides_and_the_log_says_so(server: ServerProcess) -> None:
    events = history(server, "unlucky", UNLUCKY)
    assert {"dispatched", "finished"} <= events.keys()
    until(lambda: "an unlucky number" in server.log, "the log has the reason")
