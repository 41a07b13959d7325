"""vLLM's own server, over HTTP: what clients and operators are told, from start to end."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from bench.serving.ports import free_port

pytest.importorskip("vllm")

from vllm.entrypoints.launchers.launcher import setup_server
from vllm.entrypoints.rl.online.api_router import router as rl_routes
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists

from sterna.engine.vllm.payload import decode_request
from sterna.frontend.vllm_server.server import (
    FrontendServer,
    count_all_ranks,
    number_adapters_apart,
)
from sterna.messages.actors import AbortRequests, AddRequest
from sterna.messaging.mailbox import Mailbox
from sterna.types import FrontendId, RequestId
from tests.frontend.calls import folders_called
from tests.frontend.scripted import HANG_S, ME, ready, within
from tests.frontend.served import CONFIG, MESSAGES, Scenario, Served, one_server, options_of_vllm

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    with one_server() as run:
        yield run


def _content(event: dict[str, Any]) -> str:
    return event["choices"][0]["delta"].get("content") or ""


async def history_of(served: Served, request_id: str) -> dict[str, Any]:
    answer = await served.http.get("/admin/explain", params={"request": request_id})
    (history,) = answer.json()
    return history


def test_a_chat_is_answered_by_the_instance_that_the_scheduler_named(run):
    async def test(served: Served) -> None:
        answering = served.chat(max_tokens=5)
        request = await served.cluster.i0.get_request()
        tokens = served.tokens("Terns fly far")
        served.cluster.i0.send_tokens(request.request_id, 0, tokens, FinishReason.LENGTH)
        answer = (await answering).json()
        assert answer["choices"][0]["message"]["content"] == "Terns fly far"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == len(tokens)
        assert request.request_id.startswith(answer["id"])

    run(test)


def test_a_stream_is_in_order_and_whole_over_a_move(run):
    async def test(served: Served) -> None:
        i0, i1 = served.cluster.i0, served.cluster.i1
        async with served.streamed_chat() as events:
            request_id = (await i0.get_request()).request_id
            tokens = served.tokens("From the Arctic to the Antarctic and back")
            i0.send_tokens(request_id, 0, tokens[:2])
            i1.send_moved(request_id, 4)
            i1.send_tokens(request_id, 4, tokens[4:], FinishReason.LENGTH)
            i0.send_tokens(request_id, 1, tokens[1:4])
            received = [event async for event in events]
        text = "".join(map(_content, received))
        assert text == "From the Arctic to the Antarctic and back"
        reasons = [event["choices"][0]["finish_reason"] for event in received]
        assert [reason for reason in reasons if reason] == ["length"]

    run(test)


def test_without_resumable_streams_none_of_their_code_is_on_the_way_of_a_token(run):
    """With them it is: `resumable/test_server_streams.py`."""

    async def test(served: Served) -> None:
        with folders_called("sterna/frontend") as num_calls:
            async with served.streamed_chat() as events:
                request_id = (await served.cluster.i0.get_request()).request_id
                tokens = served.tokens("Terns fly far")
                for index, token in enumerate(tokens[:-1]):
                    served.cluster.i0.send_tokens(request_id, index, [token])
                served.cluster.i0.send_tokens(
                    request_id, len(tokens) - 1, tokens[-1:], FinishReason.LENGTH
                )
                text = "".join([_content(event) async for event in events])
        assert text == "Terns fly far"
        assert {"http", "requests", "vllm_server"} <= num_calls.keys()
        assert "resumable" not in num_calls

    run(test)


def test_several_choices_are_several_requests_of_one_answer(run):
    async def test(served: Served) -> None:
        answering = served.chat(n=2, temperature=1.0)
        for _ in range(2):
            request_id = (await served.cluster.i0.get_request()).request_id
            tokens = served.tokens(f"choice {request_id[0]}")
            served.cluster.i0.send_tokens(request_id, 0, tokens, FinishReason.LENGTH)
        choices = (await answering).json()["choices"]
        assert [each["message"]["content"] for each in choices] == ["choice 0", "choice 1"]

    run(test)


def test_large_arrays_beside_the_tokens_arrive(run):
    async def test(served: Served) -> None:
        answering = served.chat(logprobs=True, top_logprobs=20)
        request_id = (await served.cluster.i0.get_request()).request_id
        tokens = served.tokens("many words in one step")
        logprobs = LogprobsLists(
            # The sampled token comes first, then the likeliest ones.
            logprob_token_ids=np.array([[token, *range(20)] for token in tokens], dtype=np.int32),
            logprobs=np.tile(-np.arange(21, dtype=np.float32), (len(tokens), 1)),
            sampled_token_ranks=np.ones(len(tokens), dtype=np.int32),
        )
        served.cluster.i0.send_tokens(
            request_id, 0, tokens, FinishReason.LENGTH, new_logprobs=logprobs
        )
        content = (await answering).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == len(tokens)
        assert [top["logprob"] for top in content[-1]["top_logprobs"]] == [-i for i in range(20)]

    run(test)


def test_a_disconnected_client_frees_its_request_where_it_is_by_then(run):
    async def test(served: Served) -> None:
        async with served.streamed_chat() as events:
            request_id = (await served.cluster.i0.get_request()).request_id
            served.cluster.i1.send_moved(request_id, 0)
            served.cluster.i1.send_tokens(request_id, 0, served.tokens("Hi"))
            assert "Hi" in [_content(await anext(events)), _content(await anext(events))]
        message, _ = await served.cluster.i1.get(AbortRequests)
        assert message.request_ids == (request_id,)
        assert (await history_of(served, request_id))["state"] == "aborted"

    run(test)


def test_a_stop_string_ends_the_answer_and_the_request(run):
    async def test(served: Served) -> None:
        answering = served.chat(stop=[" far"])
        request_id = (await served.cluster.i0.get_request()).request_id
        served.cluster.i0.send_tokens(request_id, 0, served.tokens("Terns fly far away"))
        choice = (await answering).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Terns fly", "stop")
        message, _ = await served.cluster.i0.get(AbortRequests)
        assert message.request_ids == (request_id,)
        assert (await history_of(served, request_id))["state"] == "finished"

    run(test)


def test_an_answer_with_which_two_instances_died_is_a_500_error(run):
    async def test(served: Served) -> None:
        answering = served.chat()
        await served.cluster.i0.get_request()
        served.cluster.announce(served.cluster.i1)
        await served.cluster.i1.get_request()
        served.cluster.announce()
        answer = await answering
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "InternalServerError"
        assert "killed_instances" in error["message"]

    run(test)


def test_a_stream_with_which_two_instances_died_ends_with_an_error_event(run):
    async def test(served: Served) -> None:
        async with served.streamed_chat() as events:
            request_id = (await served.cluster.i0.get_request()).request_id
            served.cluster.i0.send_tokens(request_id, 0, served.tokens("Hi"))
            while _content(await anext(events)) != "Hi":
                pass
            served.cluster.announce(served.cluster.i1)
            await served.cluster.i1.get_request()
            served.cluster.announce()
            received = [event async for event in events]
        (error,) = [event["error"] for event in received]
        assert error["code"] == 500
        assert "killed_instances" in error["message"]

    run(test)


def test_a_stream_goes_on_behind_the_tokens_that_its_client_has(run):
    async def test(served: Served) -> None:
        i0, i1 = served.cluster.i0, served.cluster.i1
        async with served.streamed_chat() as events:
            request_id = (await i0.get_request()).request_id
            i0.send_tokens(request_id, 0, served.tokens("Hi"))
            while _content(await anext(events)) != "Hi":
                pass
            served.cluster.announce(i1)
            message, (payload,) = await i1.get(AddRequest)
            assert message.output_token_ids == tuple(served.tokens("Hi"))
            attempt_id = decode_request(payload).request_id
            i1.send_tokens(attempt_id, 1, served.tokens(" there"), FinishReason.LENGTH)
            text = "".join([_content(event) async for event in events])
        assert text == " there"

    run(test)


def test_a_stream_goes_on_when_another_instance_has_adopted_it(run):
    async def test(served: Served) -> None:
        i0, i1 = served.cluster.i0, served.cluster.i1
        async with served.streamed_chat() as events:
            request_id = (await i0.get_request()).request_id
            i0.send_tokens(request_id, 0, served.tokens("Hi"))
            i1.claims.add(RequestId(request_id))
            served.cluster.announce(i1)
            i1.send_moved(request_id, 1)
            i1.send_tokens(request_id, 1, served.tokens(" there"), FinishReason.LENGTH)
            text = "".join([_content(event) async for event in events])
        assert text == "Hi there"

    run(test)


def test_a_server_that_has_started_loads_adapters_for_its_callers(run):
    """Until then one instance that has an adapter of the options is enough."""

    async def test(served: Served) -> None:
        assert not served.server._router.utilities.is_starting

    run(test)


def test_health_is_that_of_the_cluster(run):
    async def test(served: Served) -> None:
        await served.healthy(200)
        served.cluster.announce()
        await served.healthy(503)
        served.cluster.announce(served.cluster.i0)
        await served.healthy(200)

    run(test)


def test_metrics_keep_vllms_names(run):
    async def test(served: Served) -> None:
        answering = served.chat()
        request_id = (await served.cluster.i0.get_request()).request_id
        served.cluster.i0.send_tokens(request_id, 0, [1, 2, 3], FinishReason.STOP)
        await answering
        text = (await served.http.get("/metrics")).text
        (line,) = [
            line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
        ]
        assert float(line.split()[-1]) >= 3
        assert 'vllm:request_success_total{engine="0",finished_reason="stop"' in text

    run(test)


def test_a_bad_request_gets_vllms_own_error(run):
    async def test(served: Served) -> None:
        answer = await served.chat(max_tokens=-1)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
        answer = await served.post("/v1/chat/completions", model="large", messages=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")

    run(test)


@pytest.mark.parametrize("name", ["x" * 2_000, "x\x1b[2J", "x\ny"], ids=["long", "code", "line"])
@pytest.mark.parametrize("parameter", ["request_id", "session_id"])
def test_a_name_that_cannot_be_kept_or_shown_is_refused(run, parameter, name):
    """Those of ended requests are kept, and printed in operators' terminals."""

    async def test(served: Served) -> None:
        answer = await served.chat(**{parameter: name})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, parameter)
        assert "at most 512 characters, all of them printable" in error["message"]

    run(test)


def test_an_image_has_no_long_name_of_a_clients():
    """It would be hashed with each block of the KV cache, in the loop that serves all clients."""
    from vllm.exceptions import VLLMValidationError

    from sterna.frontend.vllm_server.server import _check_hashes

    _check_hashes({"type": "token", "prompt_token_ids": [1]})
    _check_hashes({"type": "multimodal", "mm_hashes": {"image": ["a" * 64, None]}})
    with pytest.raises(VLLMValidationError, match="uuid must have at most 512 characters"):
        _check_hashes({"type": "multimodal", "mm_hashes": {"image": ["a", "b" * 513]}})


def test_operators_need_the_servers_key(run):
    async def test(served: Served) -> None:
        answer = await served.http.get("/admin/requests", headers={"Authorization": ""})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == 401

    run(test)


def test_adapters_that_two_front_ends_load_have_different_numbers():
    """The second one stands in for the first, which died, and whose engines live on."""
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    class Engine:
        model_config = renderer = input_processor = None

        def __init__(self) -> None:
            self.adapters: dict[str, int] = {}

        async def add_lora(self, lora_request: Any) -> bool:
            self.adapters[lora_request.lora_name] = lora_request.lora_int_id
            return True

    async def adapters_of(frontend_id: FrontendId, loaded: str) -> dict[str, int]:
        engine = Engine()
        modules = [LoRAModulePath(name="of-the-start", path="/adapters/0")]
        models = OpenAIServingModels(engine, [], lora_modules=modules)
        await models.init_static_loras()
        number_adapters_apart(models, frontend_id)
        path = f"/adapters/{loaded}"
        await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=loaded, lora_path=path))
        return engine.adapters

    async def test() -> None:
        one = await adapters_of(FrontendId(1), "terns")
        other = await adapters_of(FrontendId(2), "gulls")
        assert one["of-the-start"] == other["of-the-start"]
        assert len({*one.values(), *other.values()}) == 3
        # The number has 32 bits in an engine, with a sign.
        late = await adapters_of(FrontendId(500_000), "terns")
        assert late["terns"] < 1 << 31

    asyncio.run(within(test()))


def test_a_trainer_of_weights_learns_the_ranks_of_all_instances():
    """vLLM's route would say 1, which a front end's configuration has."""

    async def test() -> list[int]:
        app = FastAPI()
        app.include_router(rl_routes)
        count_all_ranks(app, 2, SimpleNamespace(instances=("i0", "i1", "i2")))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sterna") as client:
            answers = [
                await client.get("/get_world_size", params=params)
                for params in ({}, {"include_dp": True}, {"include_dp": False})
            ]
        return [each.json()["world_size"] for each in answers]

    assert asyncio.run(test()) == [6, 6, 2]


def test_there_is_no_world_size_outside_of_vllms_development_mode():
    app = FastAPI()
    before = list(app.routes)
    count_all_ranks(app, 2, SimpleNamespace(instances=("i0", "i1")))
    assert app.routes == before


def test_operators_see_instances_and_requests(run):
    async def test(served: Served) -> None:
        served.cluster.scheduler.described = [{"id": "i0", "state": "running"}]
        served.cluster.i0.described = [{"id": "chatcmpl-tern-9f86d081", "priority": 1}]
        served.cluster.i1.described = []
        # The first one was dispatched after the instance had answered.
        served.cluster.scheduler.held = [
            {"id": "chatcmpl-tern-9f86d081", "priority": 1},
            {"id": "chatcmpl-auk-5e884898", "priority": 0},
        ]
        answer = await served.http.get("/admin/instances")
        assert answer.json() == [{"id": "i0", "state": "running"}]
        listed = [
            {"id": "chatcmpl-tern-9f86d081", "priority": 1, "instance": "i0", "class": "high"},
            {"id": "chatcmpl-auk-5e884898", "priority": 0, "instance": None, "class": "normal"},
        ]
        for path in ("/admin/requests", f"/admin/requests?timeout_s={HANG_S:g}"):
            assert (await served.http.get(path)).json() == listed

    run(test)


def test_an_operator_moves_every_choice_of_a_response(run):
    async def test(served: Served) -> None:
        served.cluster.i0.described = [
            {"id": "0_chatcmpl-gull-0a1b2c3d", "priority": 0},
            {"id": "1_chatcmpl-gull-0a1b2c3d", "priority": 0},
        ]
        served.cluster.i1.described = [{"id": "2_chatcmpl-gull-0a1b2c3d", "priority": 0}]
        answer = await served.post("/admin/migrate", request="gull", to="i1")
        assert [each["request"][0] for each in answer.json()] == ["0", "1"]
        assert {each["from"] for each in answer.json()} == {"i0"}

    run(test)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"request": "tern", "to": "i9"}, 404, "no instance is called i9; there are: i0, i1"),
        ({"request": "gull", "to": "i1"}, 404, "no live request is called gull"),
        ({"request": "tern", "to": "i0"}, 409, "tern is on i0 already"),
        ({"request": "tern", "to": "i1"}, 409, "chatcmpl-tern-9f86d081: its batch is full"),
        (
            {"request": "puffin", "to": "i1"},
            409,
            "puffin waits at the scheduler: it is on no instance yet",
        ),
    ],
)
def test_an_operator_is_told_why_a_request_does_not_move(
    run, body: dict[str, str], status: int, message: str
):
    async def test(served: Served) -> None:
        served.cluster.i0.described = [{"id": "chatcmpl-tern-9f86d081", "priority": 0}]
        served.cluster.i1.described = []
        served.cluster.scheduler.held = [{"id": "cmpl-puffin-0-7d865e95", "priority": 0}]
        served.cluster.i0.refusal = "its batch is full"
        answer = await served.post("/admin/migrate", **body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == message

    run(test)


@pytest.mark.parametrize(
    ("options", "part_of_message"),
    [
        (["--max-num-sequences=8"], "unrecognized arguments: --max-num-sequences=8"),
        (["--max-num-seqs", "x"], "invalid int value: 'x'"),
        (["--max-num-seqs", "0"], "max_num_seqs: Input should be greater than or equal to 1"),
        (["--port", "8001"], "it concerns more than the engines"),
    ],
)
def test_a_restart_with_options_that_no_engine_can_have_is_refused(
    run, options: list[str], part_of_message: str
):
    """Before the supervisor, which this cluster lacks, is asked for it."""

    async def test(served: Served) -> None:
        answer = await served.post("/admin/restart", options=options)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert part_of_message in message
        assert len(message.splitlines()) == 1
        answer = await served.post("/admin/restart", options=["--max-num-seqs", "8"])
        assert answer.status_code == 503
        assert "there is no supervisor at this moment" in answer.json()["error"]["message"]

    run(test)


@pytest.mark.slow
def test_a_response_in_the_background_is_finished_and_fetched_at_the_end(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")

    async def test(served: Served) -> None:
        queued = await served.post("/v1/responses", model="small", input="Hello!", background=True)
        path = f"/v1/responses/{queued.json()['id']}"
        request_id = (await served.cluster.i0.get_request()).request_id
        finishing = asyncio.create_task(served.server.finish_requests(HANG_S))
        await served.healthy(503)
        assert (await served.http.get(path)).json()["status"] == "queued"
        # The last token is the one at which it stops.
        tokens = [*served.tokens("Terns fly far"), 0]
        served.cluster.i0.send_tokens(request_id, 0, tokens, FinishReason.STOP)
        assert await finishing == 0
        answer = (await served.http.get(path)).json()
        assert answer["status"] == "completed"
        assert answer["output"][-1]["content"][0]["text"] == "Terns fly far"

    with one_server() as run_at_the_end:
        run_at_the_end(test)


@contextmanager
def _unstarted(port: int) -> Iterator[FrontendServer]:
    mailbox = Mailbox("127.0.0.1")
    yield FrontendServer(ME, options_of_vllm(port), CONFIG, mailbox, ready())
    mailbox.close()


def test_a_server_whose_port_is_taken_says_so():
    async def test(port: int) -> None:
        with (
            _unstarted(port) as server,
            pytest.raises(OSError, match="Address already in use"),
        ):
            await server.start()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(within(test(taken.getsockname()[1])))


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def test_a_server_can_be_stopped_while_it_waits_for_the_first_instance(monkeypatch):
    async def test() -> None:
        port, is_set_up = free_port(), asyncio.Event()

        def set_up(*args: Any, **options: Any) -> Any:
            is_set_up.set()
            return setup_server(*args, **options)

        monkeypatch.setattr("sterna.frontend.vllm_server.server.setup_server", set_up)
        with _unstarted(port) as server:
            starting = asyncio.create_task(server.start())
            await is_set_up.wait()
            assert _is_taken(port)
            await server.stop()
            with pytest.raises(asyncio.CancelledError):
                await starting
        assert not _is_taken(port)

    asyncio.run(within(test()))
