"""Service tiers: the priority class of a request, and OpenAI's `service_tier` in its answer.

A client asks for a class by `service_tier`, by vLLM's `priority`, or by vLLM's header for it; its
API key may set a limit. The answer's `service_tier` names the class that it got, in streams in
every chunk. The class gets to the engine by `admitted_priority`, not through vLLM's code, so that
all engine requests of one HTTP request (several choices, the turns of a tool loop) have that class.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sterna.errors import SternaError
from sterna.frontend.http.body_limit import replaying, whole_body
from sterna.frontend.http.request_context import Admission, caller, current, entered
from sterna.frontend.http.request_errors import error_response
from sterna.frontend.http.routes import RESPONSES_PATH
from sterna.frontend.http.tier_echo import echoing, echoing_responses
from sterna.priority_classes import TIER_OF_CHOICE, PriorityClass, PriorityClasses

PRIORITY_HEADER = "X-Vllm-Priority"
"""vLLM's own header; it overrides the body's `priority`."""

RESPONSES_TIERS = frozenset({"auto", "default", "flex", "scale", "priority"})
"""The values of `service_tier` that vLLM's Responses API accepts, and echoes."""


MAX_LENIENT_BYTES = 1 << 20
"""Up to this size a body may be JSON that only Python's reader accepts. That reader blocks the
event loop until it is done, also from a thread: tenths of a second for a few MiB, in which streams
pause."""


def read_leniently(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a body of up to `MAX_LENIENT_BYTES` that is not strict JSON: Python's
    reader accepts more (NaN, UTF-16), and so does vLLM. None if it is longer, or no object."""
    if len(body) > MAX_LENIENT_BYTES:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class LenientBodyError(SternaError):
    """The body is not strict JSON (msgspec's), and too long for Python's reader."""


class TierError(SternaError):
    """The request asks for an unknown tier, or for two classes; the message says which."""


def admitted_priority(vllm_priority: int, classes: PriorityClasses) -> int:
    """Return vLLM's priority for the class of the request being answered.

    Args:
        vllm_priority: the one that vLLM has read from the request.
    """
    admission = current().admission
    if admission is not None and admission.used is not None:
        used = admission.used
    else:
        highest = None if admission is None else admission.highest
        used = classes.admitted(classes.of_vllm_priority(vllm_priority), highest)
    return -used.scheduling_priority


def used_class() -> PriorityClass | None:
    """Return the class of the request being answered; None if only vLLM knows it."""
    admission = current().admission
    return None if admission is None else admission.used


class PriorityFields(msgspec.Struct, frozen=True):
    """The fields of a body that ask for a class, of any type; other fields are skipped.

    Attributes:
        service_tier: None if it is null or absent.
        priority: None likewise.
    """

    service_tier: Any = None
    priority: Any = None

    @staticmethod
    def read(body: bytes) -> "PriorityFields | None":
        """Return the fields; None for a body that is no JSON object, which vLLM will refuse.

        Raises:
            LenientBodyError: the body is long, and not strict JSON.
        """
        try:
            return _ASKED.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        except RecursionError:
            # Nested too deeply for every reader.
            return None
        if len(body) > MAX_LENIENT_BYTES:
            mib = MAX_LENIENT_BYTES >> 20
            raise LenientBodyError(
                f"a body of more than {mib} MiB must be strict JSON in UTF-8, without NaN"
            )
        fields = read_leniently(body)
        if fields is None:
            return None
        return PriorityFields(fields.get("service_tier"), fields.get("priority"))


_ASKED = msgspec.json.Decoder(PriorityFields)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def asked_class(
    asked: PriorityFields, header: str | None, classes: PriorityClasses
) -> PriorityClass:
    """Return the class that a request asks for, before any limit.

    Args:
        header: the value of PRIORITY_HEADER.

    Raises:
        TierError: there is no such tier, or tier and priority ask for different classes.
    """
    number = _integer(asked.priority if _integer(header) is None else header)
    by_priority = None if number is None else classes.of_vllm_priority(number)
    tier = asked.service_tier
    if tier is None:
        return by_priority or classes.normal
    by_tier = classes.of_tier(tier) if isinstance(tier, str) else None
    if by_tier is None:
        known = ", ".join(classes.tiers)
        raise TierError(f"service_tier must be one of {known}, not {json.dumps(tier)[:100]}")
    if by_priority is None:
        return by_tier
    if tier == TIER_OF_CHOICE:
        return by_priority
    if by_priority != by_tier:
        raise TierError(
            f"service_tier {json.dumps(tier)} and priority {number} ask for different classes, "
            f"{by_tier.name} and {by_priority.name}; leave one out"
        )
    return by_tier


def _integer(value: Any) -> int | None:
    """Return the value as an integer if vLLM would accept it as one; None for others, which vLLM
    refuses."""
    if isinstance(value, str):
        value = value.strip()
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        return None


class TierMiddleware:
    """Finds the class of each request, and writes it into the answer.

    It is further in than the check of API keys.
    """

    def __init__(self, app: ASGIApp, classes: PriorityClasses) -> None:
        self._app = app
        self._classes = classes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if caller().route.has_tiers and scope.get("method") == "POST":
            await self._answer(scope, receive, send)
            return
        with _admitted(self._highest(), None):
            await self._app(scope, receive, send)

    def _highest(self) -> PriorityClass | None:
        asking = caller()
        if asking.key is not None:
            return asking.key.highest
        # Some routes need no key: a caller without one gets the normal class there.
        return None if asking.is_known else self._classes.normal

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        highest = self._highest()
        body = await whole_body(receive)
        if body is None:
            return
        try:
            asked = PriorityFields.read(body)
        except LenientBodyError as error:
            await error_response(HTTPStatus.BAD_REQUEST, str(error))(scope, receive, send)
            return
        if asked is None:
            with _admitted(highest, None):
                await self._app(scope, replaying(body, receive), send)
            return
        header = Headers(scope=scope).get(PRIORITY_HEADER)
        try:
            wanted = asked_class(asked, header, self._classes)
        except TierError as error:
            await _refusal(error)(scope, receive, send)
            return
        used = self._classes.admitted(wanted, highest)
        tier = self._classes.tier_of(used)
        if caller().path == RESPONSES_PATH:
            known_tier = tier if tier in RESPONSES_TIERS else TIER_OF_CHOICE
            if asked.service_tier != known_tier:
                scope, body = _with_tier(scope, body, known_tier)
            send = send if tier == known_tier else echoing_responses(send, tier)
        else:
            send = echoing(send, tier)
        with _admitted(highest, used):
            await self._app(scope, replaying(body, receive), send)


def _admitted(
    highest: PriorityClass | None, used: PriorityClass | None
) -> AbstractContextManager[None]:
    return entered(replace(current(), admission=Admission(highest, used)))


def _with_tier(scope: Scope, body: bytes, tier: str) -> tuple[Scope, bytes]:
    """Return the request with this tier in its body, in place of the tier of its client."""
    try:
        # The other fields are copied unchanged.
        strict: dict[str, Any] = {**_FIELDS.decode(body)}
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = json.dumps({**json.loads(body), "service_tier": tier}).encode()
    else:
        body = msgspec.json.encode({**strict, "service_tier": tier})
    scope = {**scope, "headers": list(scope["headers"])}
    headers = MutableHeaders(scope=scope)
    if "content-length" in headers:
        headers["content-length"] = str(len(body))
    return scope, body


def _refusal(error: TierError) -> JSONResponse:
    return error_response(HTTPStatus.BAD_REQUEST, str(error), parameter="service_tier")
