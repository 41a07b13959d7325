"""The operators' API, beside OpenAI's: what runs where, and moving a request by hand.

    GET  /admin/instances   [{id, state, total_tokens, used_tokens, freeness, running, queuing,
                              migrating, head_demand_tokens, preemptions, migrations_committed,
                              migrations_aborted}]
    GET  /admin/requests    [{id, instance, status, num_tokens, ...}]
    POST /admin/migrate     {request, to, mode} -> {request, from, to, stages, suspended_ms};
                            a list of these when the name stands for several requests

Errors are OpenAI's error objects. Where the server has API keys, every route asks for an
operator's: vLLM's own check guards only the inference routes.
"""

from collections.abc import Callable, Coroutine, Mapping
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
from sterna.frontend.keys import ApiKeys
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


def add_admin_routes(app: FastAPI, operators: Operators, keys: ApiKeys) -> None:
    """Add the routes to the server; where it has no API keys, everybody may use them."""

    def authorize(request: Request) -> None:
        if not keys.are_needed:
            return
        key = keys.find(request.headers.get("Authorization"))
        if key is None or not key.is_admin:
            raise UnauthorizedError("these routes need a valid API key of an operator")

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
