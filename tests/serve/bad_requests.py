"""Requests that a server must refuse."""

from dataclasses import dataclass
from typing import Any

from tests.serve.cases import LONG, WEATHER, Answer
from tests.serve.server import MODEL_NAME, ServerProcess

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@dataclass(frozen=True)
class BadRequest:
    """A request as it goes over the wire; `content` is for bodies that are not JSON."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    content: bytes | None = None
    content_type: str = "application/json"

    def __str__(self) -> str:
        return self.name

    def send(self, server: ServerProcess) -> Answer:
        """Send it; return what must be the same whoever answers."""
        with server.http() as http:
            headers = {"Content-Type": self.content_type, "X-Request-Id": self.name}
            if self.content is not None:
                answer = http.request(self.method, self.path, content=self.content, headers=headers)
            else:
                answer = http.request(self.method, self.path, json=self.body, headers=headers)
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return {
                "status": answer.status_code,
                "type": answer.headers.get("content-type"),
                "body": answer.json() if is_json else answer.text,
            }


def _chat(name: str, **options: Any) -> BadRequest:
    return BadRequest(name, CHAT, {"model": MODEL_NAME, "messages": HELLO, **options})


def _text(name: str, **options: Any) -> BadRequest:
    return BadRequest(name, TEXT, {"model": MODEL_NAME, "prompt": "Hello", **options})


def _schema(name: str, schema: Any) -> BadRequest:
    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat(name, response_format=kind)


BAD_REQUESTS = [
    BadRequest("unknown-path", "/v1/nowhere", {}),
    BadRequest("wrong-method", CHAT, method="GET"),
    BadRequest("no-body", CHAT, content=b""),
    BadRequest("not-json", CHAT, content=b'{"model": "small", "messages": ['),
    BadRequest("not-an-object", CHAT, ["small"]),
    BadRequest("wrong-content-type", CHAT, content=b"hello", content_type="text/plain"),
    BadRequest("not-utf-8", TEXT, content=b'{"model": "small", "prompt": "\xff\xfe"}'),
    BadRequest("no-messages", CHAT, {"model": MODEL_NAME}),
    _chat("unknown-model", model="large"),
    _text("unknown-model-text", model="large"),
    _chat("messages-of-wrong-type", messages="Hello"),
    _chat("empty-messages", messages=[]),
    _chat(
        "an-image-for-a-text-model",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                ],
            }
        ],
    ),
    _chat("negative-max-tokens", max_tokens=-1),
    _chat("zero-max-tokens", max_tokens=0),
    _text("negative-max-tokens-text", max_tokens=-5),
    _chat("too-many-max-tokens", max_tokens=100_000),
    _chat("max-tokens-of-wrong-type", max_tokens="many"),
    _text("too-long-prompt", prompt=LONG * 3),
    _text("too-long-prompt-of-tokens", prompt=[5] * 3000),
    _text("token-out-of-vocabulary", prompt=[10_000_000]),
    _text("empty-prompt", prompt=""),
    _text("no-prompt", prompt=None),
    _chat("negative-temperature", temperature=-1),
    _chat("temperature-of-wrong-type", temperature="hot"),
    _chat("top-p-above-1", top_p=1.5),
    _chat("top-k-below-minus-1", top_k=-2),
    _chat("min-p-above-1", min_p=2),
    _chat("presence-penalty-out-of-range", presence_penalty=9),
    _chat("repetition-penalty-negative", repetition_penalty=-1),
    _chat("n-zero", n=0),
    _chat("n-of-greedy", n=2, temperature=0),
    _chat("too-many-logprobs", logprobs=True, top_logprobs=50),
    _chat("top-logprobs-without-logprobs", top_logprobs=2),
    _text("negative-logprobs", logprobs=-2),
    _chat("min-tokens-above-max-tokens", min_tokens=9, max_tokens=3),
    _chat("logit-bias-of-wrong-type", logit_bias={"a": 1}),
    _chat("logit-bias-out-of-vocabulary", logit_bias={"99999999": 1}),
    _chat("allowed-token-ids-empty", allowed_token_ids=[]),
    _chat("stop-of-wrong-type", stop=5),
    _chat("empty-stop", stop=[""]),
    _chat("stream-options-without-stream", stream_options={"include_usage": True}),
    _schema("schema-of-wrong-type", {"type": "nothing"}),
    _schema("schema-not-an-object", "object"),
    _chat("schema-missing", response_format={"type": "json_schema"}),
    _chat("unknown-response-format", response_format={"type": "poem"}),
    _chat("bad-regex", structured_outputs={"regex": "(["}),
    _chat("bad-grammar", structured_outputs={"grammar": "root ::= ("}),
    _chat("empty-choice", structured_outputs={"choice": []}),
    _chat("two-structures", structured_outputs={"regex": "a", "choice": ["a"]}),
    _chat("tool-choice-without-tools", tool_choice="required"),
    _chat(
        "unknown-tool-choice",
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "fly"}},
    ),
    _chat("unknown-priority", priority="high"),
    _text("echo-of-a-stream-of-prompt-logprobs", stream=True, prompt_logprobs=1),
    _text("suffix", suffix="the end"),
    _text("beams-of-a-stream", use_beam_search=True, n=2, stream=True),
    BadRequest("tokenize-nothing", "/tokenize", {"model": MODEL_NAME}),
    BadRequest("detokenize-words", "/detokenize", {"model": MODEL_NAME, "tokens": ["a"]}),
    BadRequest("embeddings", "/v1/embeddings", {"model": MODEL_NAME, "input": "Hello"}),
    BadRequest("empty-response", "/v1/responses", {"model": MODEL_NAME}),
]
