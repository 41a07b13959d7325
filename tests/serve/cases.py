"""Varied requests of OpenAI's API, and their answers in a form that can be compared.

An answer must not depend on who gave it: ids and times are left out, and the pieces of a stream
are put together, because how many tokens come in one piece depends on the server's load.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serve.server import MODEL_NAME, ServerProcess

Answer = dict[str, Any]

MAX_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        send: sends it with OpenAI's client and returns the comparable answer.
        is_moved: whether it runs long enough for a migration.
        in_batch: whether it is several sequences, which in bfloat16 generate other tokens when
            they are not in one batch.
    """

    name: str
    send: Callable[[ServerProcess], Answer]
    is_moved: bool = True
    in_batch: bool = False

    def __str__(self) -> str:
        return self.name


FERN = "Tell me about ferns."
STORY = "Once upon a time, in a village by the sea,"
COUNT = "1, 2, 3, 4, 5, 6, 7, 8,"
LONG = " ".join(f"Chapter {i}: the tern flew {7 * i} miles over the sea." for i in range(1, 90))

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "large"]},
        "year": {"type": "integer"},
    },
    "required": ["name", "size", "year"],
    "additionalProperties": False,
}
CITY_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "unit"],
        },
    },
}
WEATHER_CHOICE = {"type": "function", "function": {"name": "get_weather"}}
ASK_WEATHER = "What is the weather in Paris?"


def chat(
    name: str,
    content: Any = FERN,
    *,
    messages: list[Any] | None = None,
    is_moved: bool = True,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A chat completion; `extra` are vLLM's own options."""
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **options}
    turns = messages or [{"role": "user", "content": content}]

    def send(server: ServerProcess) -> Answer:
        with server.client() as client:
            answer = client.chat.completions.create(
                model=MODEL_NAME,
                messages=turns,
                extra_body=extra,
                extra_headers={"X-Request-Id": name},
                **options,
            )
            return _chat_stream(answer) if options.get("stream") else _comparable(answer)

    return Case(name, send, is_moved, in_batch=options.get("n", 1) > 1)


def text(
    name: str,
    prompt: Any = STORY,
    *,
    is_moved: bool = True,
    in_batch: bool = False,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A completion; `extra` are vLLM's own options."""
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **options}
    in_batch = in_batch or options.get("n", 1) > 1

    def send(server: ServerProcess) -> Answer:
        with server.client() as client:
            answer = client.completions.create(
                model=MODEL_NAME,
                prompt=prompt,
                extra_body=extra,
                extra_headers={"X-Request-Id": name},
                **options,
            )
            return _text_stream(answer) if options.get("stream") else _comparable(answer)

    return Case(name, send, is_moved, in_batch)


def response(name: str, **options: Any) -> Case:
    """A request of the responses API."""

    def send(server: ServerProcess) -> Answer:
        with server.client() as client:
            answer = client.responses.create(
                model=MODEL_NAME,
                input=FERN,
                temperature=0.0,
                max_output_tokens=MAX_TOKENS,
                extra_headers={"X-Request-Id": name},
                **options,
            )
            if options.get("stream"):
                (answer,) = [e.response for e in answer if e.type == "response.completed"]
            output = [each.model_dump() for each in answer.output]
            usage = answer.usage.model_dump()
            return {"output": _without_ids(output), "usage": usage, "status": answer.status}

    return Case(name, send)


def page(name: str, method: str, path: str, body: Any = None) -> Case:
    """A request that generates nothing."""

    def send(server: ServerProcess) -> Answer:
        with server.http() as http:
            answer = http.request(method, path, json=body)
            return {"status": answer.status_code, "body": _body(answer)}

    return Case(name, send, is_moved=False)


def with_tier(plain: Answer) -> Answer:
    """What plain vLLM answers, with the tier of who asks for none: it gets the default one and is
    told so, where vLLM has none."""
    if plain.get("service_tier", "") is None:
        return {**plain, "service_tier": "default"}
    return plain


def without_texts(answer: Answer) -> Answer:
    """Return what of an answer does not depend on the tokens: choices, reasons to end, usage."""
    choices = answer["choices"]
    listed = choices if isinstance(choices, list) else choices.values()
    ends = [choice.get("ends", choice.get("finish_reason")) for choice in listed]
    return {"ends": ends, "usage": answer["usage"]}


def metrics(server: ServerProcess) -> Answer:
    """The names and kinds of vLLM's metrics, without the times at which series were created.

    Like several API servers of vLLM, front ends share their metrics through files, which have none.
    """
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    kinds = {line for line in lines if line.startswith("# TYPE vllm:")}
    return {"kinds": sorted(line for line in kinds if not line.endswith("_created gauge"))}


def _comparable(answer: Any) -> Answer:
    return _without_ids(answer.model_dump())


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("id", "created", "created_at", "system_fingerprint", "_request_id")
        return {k: _without_ids(v) for k, v in value.items() if k not in left_out}
    if isinstance(value, list):
        return [_without_ids(each) for each in value]
    return value


def _chat_stream(chunks: Iterable[Any]) -> Answer:
    choices: dict[int, Answer] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            whole = choices.setdefault(
                choice.index, {"content": "", "tools": {}, "logprobs": [], "ends": []}
            )
            whole["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                tool = whole["tools"].setdefault(call.index, {"name": "", "arguments": ""})
                tool["name"] += call.function.name or ""
                tool["arguments"] += call.function.arguments or ""
            if choice.logprobs is not None:
                whole["logprobs"] += [each.model_dump() for each in choice.logprobs.content or ()]
            _note_end(whole, choice)
    return {"choices": choices, "usage": usage and usage.model_dump()}


def _text_stream(chunks: Iterable[Any]) -> Answer:
    choices: dict[int, Answer] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            whole = choices.setdefault(choice.index, {"text": "", "logprobs": {}, "ends": []})
            whole["text"] += choice.text
            if choice.logprobs is not None:
                for field, values in choice.logprobs.model_dump().items():
                    whole["logprobs"].setdefault(field, []).extend(values or ())
            _note_end(whole, choice)
    return {"choices": choices, "usage": usage and usage.model_dump()}


def _note_end(whole: Answer, choice: Any) -> None:
    if choice.finish_reason is not None:
        whole["ends"].append([choice.finish_reason, getattr(choice, "stop_reason", None)])


def _body(answer: httpx.Response) -> Any:
    try:
        return _without_ids(answer.json())
    except ValueError:
        return answer.text


CASES = [
    chat("chat"),
    chat("chat-stream", stream=True),
    chat("chat-usage", stream=True, stream_options={"include_usage": True}),
    chat(
        "chat-usage-at-each-token",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat(
        "chat-turns",
        messages=[
            {"role": "system", "content": "You are a pirate."},
            {"role": "user", "content": "Who are you?"},
            {"role": "assistant", "content": "Arr, I sail the seas."},
            {"role": "user", "content": "Where to?"},
        ],
    ),
    chat("chat-parts", [{"type": "text", "text": "Name a bird"}, {"type": "text", "text": "or 2"}]),
    chat("chat-seed", temperature=1.0, seed=7),
    chat("chat-seed-stream", temperature=1.0, seed=8, stream=True),
    chat("chat-top-p", temperature=1.0, seed=9, top_p=0.7),
    chat("chat-top-k", temperature=1.3, seed=10, extra={"top_k": 20}),
    chat("chat-min-p", temperature=1.3, seed=11, extra={"min_p": 0.05}),
    chat("chat-logprobs", logprobs=True, top_logprobs=5),
    chat("chat-logprobs-stream", logprobs=True, top_logprobs=2, stream=True),
    chat("chat-prompt-logprobs", extra={"prompt_logprobs": 2}),
    chat("chat-presence", presence_penalty=1.5),
    chat("chat-frequency", frequency_penalty=1.2),
    chat("chat-repetition", extra={"repetition_penalty": 1.3}),
    chat(
        "chat-penalties-stream",
        temperature=0.9,
        seed=12,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        stream=True,
        extra={"repetition_penalty": 1.1},
    ),
    chat("chat-logit-bias", logit_bias={"28": -100, "30": 5}),
    chat("chat-min-tokens", "Say only: yes", extra={"min_tokens": 20}),
    chat("chat-max-tokens-1", max_tokens=1, is_moved=False),
    chat("chat-max-completion-tokens", max_tokens=None, max_completion_tokens=20),
    chat("chat-ignore-eos", "Say only: yes", extra={"ignore_eos": True}),
    chat("chat-eos", "Say only: yes", max_tokens=200, is_moved=False),
    chat("chat-stop", "Count from 1 to 30.", stop=["5", "6"], max_tokens=40),
    chat("chat-stop-stream", "Count from 1 to 30.", stop=["6"], stream=True, max_tokens=40),
    chat("chat-stop-kept", stop=["family"], extra={"include_stop_str_in_output": True}),
    chat("chat-stop-token", extra={"stop_token_ids": [30]}),
    chat("chat-bad-words", extra={"bad_words": ["the", "fern", "plants"]}),
    chat("chat-allowed", extra={"allowed_token_ids": list(range(300, 4000))}),
    chat("chat-json", "Describe Rome in JSON.", response_format={"type": "json_object"}),
    chat("chat-schema", "Describe Rome.", response_format=CITY_FORMAT),
    chat("chat-schema-stream", "Describe Oslo.", response_format=CITY_FORMAT, stream=True),
    chat(
        "chat-schema-seed",
        "Describe Bern.",
        response_format=CITY_FORMAT,
        temperature=1.2,
        seed=13,
        logprobs=True,
    ),
    chat("chat-regex", extra={"structured_outputs": {"regex": r"([a-z]{2,9}, ){5}[a-z]+\."}}),
    chat(
        "chat-choice",
        "Is it hot in hell?",
        extra={"structured_outputs": {"choice": ["certainly not", "most certainly yes"]}},
        is_moved=False,
    ),
    chat(
        "chat-grammar",
        extra={"structured_outputs": {"grammar": 'root ::= ("fern " | "moss ")+ "."'}},
    ),
    chat(
        "chat-tool-named", ASK_WEATHER, tools=[WEATHER], tool_choice=WEATHER_CHOICE, max_tokens=64
    ),
    chat(
        "chat-tool-named-stream",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice=WEATHER_CHOICE,
        max_tokens=64,
        stream=True,
    ),
    chat("chat-tool-required", ASK_WEATHER, tools=[WEATHER], tool_choice="required", max_tokens=64),
    chat(
        "chat-tool-required-stream",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=64,
        stream=True,
    ),
    chat("chat-tool-auto", ASK_WEATHER, tools=[WEATHER], tool_choice="auto"),
    chat("chat-tool-none", ASK_WEATHER, tools=[WEATHER], tool_choice="none"),
    chat("chat-n", n=3, temperature=1.0, seed=14, extra={"ignore_eos": True}),
    chat(
        "chat-n-stream",
        n=3,
        temperature=1.0,
        seed=15,
        stream=True,
        extra={"ignore_eos": True},
    ),
    chat("chat-echo", extra={"echo": True}),
    chat(
        "chat-continue",
        messages=[
            {"role": "user", "content": "Name three birds."},
            {"role": "assistant", "content": "The tern, the"},
        ],
        extra={"continue_final_message": True, "add_generation_prompt": False},
    ),
    chat("chat-token-ids", extra={"return_token_ids": True}),
    response("response"),
    response("response-stream", stream=True),
    text("text"),
    text("text-stream", stream=True),
    text("text-usage", stream=True, stream_options={"include_usage": True}),
    text("text-logprobs", logprobs=4),
    text("text-logprobs-stream", logprobs=2, stream=True),
    text("text-echo", echo=True),
    text("text-echo-logprobs", echo=True, logprobs=2),
    text("text-echo-stream", echo=True, stream=True),
    text("text-prompt-logprobs", extra={"prompt_logprobs": 1}),
    text("text-token-ids", [1, 504, 980, 282, 260, 3075, 314]),
    text("text-two-prompts", [STORY, COUNT], in_batch=True, extra={"ignore_eos": True}),
    text(
        "text-two-prompts-stream",
        [STORY, COUNT],
        stream=True,
        in_batch=True,
        extra={"ignore_eos": True},
    ),
    text("text-n", n=3, temperature=1.0, seed=16, extra={"ignore_eos": True}),
    text("text-seed", temperature=1.0, seed=17),
    text("text-seed-stream", temperature=1.0, seed=18, stream=True, logprobs=1),
    text(
        "text-sampling",
        temperature=1.4,
        seed=19,
        top_p=0.95,
        extra={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
    ),
    text("text-penalties", presence_penalty=1.0, frequency_penalty=1.0),
    text("text-logit-bias", logit_bias={"28": -100, "30": -100}),
    text("text-bad-words", extra={"bad_words": ["man", " young"]}),
    text("text-stop", COUNT, stop=["13"]),
    text("text-stop-stream", COUNT, stop=["14"], stream=True),
    text("text-min-tokens", COUNT, stop=["1"], extra={"min_tokens": 15}),
    text("text-ignore-eos", max_tokens=40, extra={"ignore_eos": True}),
    text("text-max-tokens-1", max_tokens=1, is_moved=False),
    text("text-long-prompt", LONG),
    text("text-long-prompt-stream", LONG, stream=True, logprobs=1),
    text("text-schema", "A city: ", extra={"structured_outputs": {"json": CITY}}),
    text("text-regex", "Dates: ", extra={"structured_outputs": {"regex": r"(\d{4}-\d\d; ){4}"}}),
    text("text-named-tokens", logprobs=1, extra={"return_tokens_as_token_ids": True}),
    text("text-truncated", LONG, extra={"truncate_prompt_tokens": 100}),
    text("text-special-tokens", extra={"skip_special_tokens": False, "ignore_eos": True}),
    page("models", "GET", "/v1/models"),
    page("version", "GET", "/version"),
    page("health", "GET", "/health"),
    page("ping", "GET", "/ping"),
    page("tokenize", "POST", "/tokenize", {"model": MODEL_NAME, "prompt": STORY}),
    page(
        "tokenize-chat",
        "POST",
        "/tokenize",
        {"messages": [{"role": "user", "content": FERN}], "return_token_strs": True},
    ),
    page("detokenize", "POST", "/detokenize", {"model": MODEL_NAME, "tokens": [504, 980, 282]}),
    Case("metrics", metrics, is_moved=False),
]
"""In the order of sending; the metrics come last, when there is something to measure."""
