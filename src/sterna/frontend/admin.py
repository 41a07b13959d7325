"""The operators' API, beside OpenAI's: what runs where, and moving a request by hand.

    GET  /admin/instances   [{id, state, total_tokens, used_tokens, freeness, running, queuing,
                              migrating, head_demand_tokens, preemptions, migrations_committed,
                              migrations_aborted}]
    GET  /admin/requests    [{id, instance, status, num_tokens, ...}]
    POST /admin/migrate     {request, to, mode} -> {request, from, to, stages, suspended_ms};
                            a list of these when the name stands for several requests

Errors are OpenAI's error objects. Where the server has API keys, every route asks for one:
vLLM's own check guards only the inference routes.
"""

import hashlib
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from sterna.errors import (
    ImmovableError,
    SternaError,
    UnansweredError,
    UnknownInstanceError,
    UnknownRequestError,
)
from sterna.frontend.operators import Operators
from sterna.migration.messages import Mode
from sterna.types import InstanceId


class BadRequestError(SternaError):
    """The body of an operator's request cannot be understood; the message says why."""


class UnauthorizedError(SternaError):
    """The operator's request has no valid API key."""


_STATUS: Mapping[type[SternaError], HTTPStatus] = MappingProxyType(
    {
        BadRequestError: HTTPStatus.BAD_REQUEST,
        UnauthorizedError: HTTPStatus.UNAUTHORIZED,
        UnknownInstanceError: HTTPStatus.NOT_FOUND,
        UnknownRequestError: HTTPStatus.NOT_FOUND,
        ImmovableError: HTTPStatus.CONFLICT,
        UnansweredError: HTTPStatus.SERVICE_UNAVAILABLE,
    }
)


class MigrateBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to move where; see `Operators.migrate`."""

    request: str
    to: InstanceId
    mode: Mode = Mode.LIVE


def add_admin_routes(app: FastAPI, operators: Operators, api_keys: Sequence[str]) -> None:
    """Add the routes to the server; with no API key, everybody may use them."""
    digests = [_digest(key) for key in api_keys]

    def authorize(request: Request) -> None:
        if digests and not _is_authorized(request.headers.get("Authorization"), digests):
            raise UnauthorizedError("these routes need a valid API key")

    router = APIRouter(
        prefix="/admin",
        tags=["admin"],
        dependencies=[Depends(authorize)],
        route_class=_AdminRoute,
    )

    @router.get("/instances")
    async def list_instances() -> Response:
        return JSONResponse(await operators.list_instances())

    @router.get("/requests")
    async def list_requests() -> Response:
        return JSONResponse(await operators.list_requests())

    @router.post("/migrate")
    async def migrate(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=MigrateBody)
        except msgspec.DecodeError as error:
            raise BadRequestError(str(error)) from error
        reports = await operators.migrate(body.request, body.to, body.mode)
        return JSONResponse(reports if len(reports) != 1 else reports[0])

    app.include_router(router)


class _AdminRoute(APIRoute):
    """Turns our errors into error objects.

    The server's own exception handlers cannot be added to: vLLM has built them into the
    application by the time it is handed over.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_or_explain(request: Request) -> Response:
            try:
                return await handle(request)
            except SternaError as error:
                return _error_response(error)

        return handle_or_explain


def _error_response(error: SternaError) -> Response:
    status = _STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    body = {
        "message": str(error),
        "type": f"{status.phrase.replace(' ', '')}Error",
        "param": None,
        "code": status.value,
    }
    return JSONResponse({"error": body}, status_code=status.value)


def _is_authorized(header: str | None, digests: Sequence[bytes]) -> bool:
    scheme, _, key = (header or "").partition(" ")
    digest = _digest(key)
    # Every key is compared, so that the time taken does not tell which one was close.
    matches = [secrets.compare_digest(digest, each) for each in digests]
    return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
