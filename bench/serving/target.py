"""The server to which a workload is sent: its address, model and key."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from sterna.errors import ConfigurationError

QUESTION_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, its model, and its key.

    Attributes:
        url: without a path.
        max_model_len: of prompt and answer together; None where the server does not report it.
        tls: how its certificate is checked, unless as usual.
    """

    url: str
    model: str
    max_model_len: int | None
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    def session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        """A session without a limit of connections, each for one request."""
        return _session(self.api_key, timeout, self.tls)


class Model(msgspec.Struct):
    """A model in a server's list."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """A server's list of models."""

    data: list[Model]


async def find_target(
    url: str,
    api_key: str | None = None,
    model: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Target:
    """Ask the server for its models.

    Args:
        model: one of its models; None for the first.
        tls: see `Target`.

    Raises:
        ConfigurationError: no server answers, or not as OpenAI's API; the message says what to do.
    """
    url = url.rstrip("/").removesuffix("/v1")
    timeout = aiohttp.ClientTimeout(total=QUESTION_TIMEOUT_S)
    try:
        async with (
            _session(api_key, timeout, tls) as session,
            session.get(f"{url}/v1/models") as answer,
        ):
            status, content = answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigurationError(
            f"no server answers at {url} ({reason}): start one with `sterna serve`, name it with "
            "--url, or have one started with --serve"
        ) from None
    if status in (401, 403):
        state = "does not accept this API key" if api_key else "asks for an API key"
        raise ConfigurationError(f"{url} {state}: give --api-key, or set OPENAI_API_KEY")
    if status != 200:
        raise ConfigurationError(f"{url} does not list its models ({refusal(status, content)})")
    try:
        models = msgspec.json.decode(content, type=Models).data
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{url} does not list its models as OpenAI's API does ({error})"
        ) from None
    chosen = _chosen(url, models, model)
    return Target(url, chosen.id, chosen.max_model_len, api_key, tls)


def refusal(status: int, content: bytes) -> str:
    """The reason of a refusal, from the server's message where it has one."""
    try:
        answer: Any = msgspec.json.decode(content)
        return f"{status}: {answer['error']['message']}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"status {status}"


def _chosen(url: str, models: list[Model], name: str | None) -> Model:
    if not models:
        raise ConfigurationError(f"{url} serves no model")
    for each in models:
        if name in (None, each.id):
            return each
    raise ConfigurationError(
        f"{url} serves no model {name}: --model must be one of "
        f"{', '.join(each.id for each in models)}"
    )


def _session(
    api_key: str | None, timeout: aiohttp.ClientTimeout, tls: ssl.SSLContext | None
) -> aiohttp.ClientSession:
    headers: Mapping[str, str] = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # A server may close an idle connection just when a busy client reuses it, and the request is
    # lost, since it is not repeated. So every request has a connection of its own.
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=True if tls is None else tls)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
