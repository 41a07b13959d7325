"""Admin routes: the API for operators, beside OpenAI's, with lists, migrations and orders.

    GET  /admin/instances   [{id, node, state, total_tokens, used_tokens, freeness, running,
                              queuing, migrating, head_demand_tokens, preemptions,
                              migrations_committed, migrations_aborted, generation, note}]
    GET  /admin/nodes       [{node, drained, instances}]: those that have instances or are drained
    GET  /admin/requests    [{id, instance, status, num_tokens, ...}]; ?timeout_s=2: of the
                              instances that answer within this time; those that the scheduler
                              holds have no instance
    GET  /admin/explain     ?request=ID: [{id, state, instance, events: [{at_s, event, ...}], ...}]
    GET  /admin/recent      ?last_s=10: {decisions: [{time_s, request, event, ...}], ttft_s: [...],
                              tpot_s: [...], waiting}
    GET  /admin/watch       server-sent events: the dashboard's frames (`dashboard.cluster_frames`)
    POST /admin/migrate     {request, to, mode} -> {request, from, to, stages, suspended_ms};
                            a list of these when the name stands for several requests
    POST /admin/drain       {instance, undo} -> null: empty the instance, then end it; or let it
                            serve on; {node, undo}: so for all instances of this node, and place
                            none there; or place some there again
    POST /admin/start       {instances} -> null: start this number of instances more
    POST /admin/restart     {options, surge} -> {generation}: replace every instance, one at a
                            time, by one of this generation

The last three return when the work has begun; /admin/instances shows its progress.

Errors are OpenAI's error objects. If the server has API keys, every route needs the key of an
operator: vLLM's own check guards only the inference routes. `GET /dashboard`, the page that shows
the frames, needs none: it has nothing of the cluster in it, and asks for the key.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from sterna.dashboard.page import STREAM_TYPE, page
from sterna.errors import (
    UNREADABLE,
    ConfigurationError,
    FleetError,
    ImmovableError,
    SternaError,
    UnansweredError,
    UnknownInstanceError,
    UnknownRequestError,
)
from sterna.frontend.http.request_context import caller
from sterna.frontend.http.request_errors import error_response
from sterna.frontend.operators.questions import Operators
from sterna.frontend.operators.watchers import Watch
from sterna.migration.messages import Mode
from sterna.types import InstanceId

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_LAST_S = 600.0
"""The longest time of which `/admin/recent` can be asked, and time-out of `/admin/requests`."""


class BadRequestError(SternaError):
    """The body of an operator's request is not valid; the message says why."""


class UnauthorizedError(SternaError):
    """The operator's request has no valid API key."""


_STATUS: Mapping[type[SternaError], HTTPStatus] = MappingProxyType(
    {
        BadRequestError: HTTPStatus.BAD_REQUEST,
        ConfigurationError: HTTPStatus.BAD_REQUEST,
        UnauthorizedError: HTTPStatus.UNAUTHORIZED,
        FleetError: HTTPStatus.CONFLICT,
        UnknownInstanceError: HTTPStatus.NOT_FOUND,
        UnknownRequestError: HTTPStatus.NOT_FOUND,
        ImmovableError: HTTPStatus.CONFLICT,
        UnansweredError: HTTPStatus.SERVICE_UNAVAILABLE,
    }
)


class MigrateBody(msgspec.Struct, forbid_unknown_fields=True):
    """The request to move, and its destination; see `Operators.migrate`."""

    request: str
    to: InstanceId
    mode: Mode = Mode.LIVE


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """The instance or the node to empty; see `Operators.drain` and `drain_node`."""

    instance: InstanceId | None = None
    node: str | None = None
    undo: bool = False


class StartBody(msgspec.Struct, forbid_unknown_fields=True):
    """The number of instances to start; see `Operators.start_instances`."""

    # The supervisor says which numbers make sense; a message cannot carry any.
    instances: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 1


class RestartBody(msgspec.Struct, forbid_unknown_fields=True):
    """The options of a rolling restart; see `Operators.restart`."""

    options: tuple[str, ...] = ()
    surge: bool = True


def add_admin_routes(
    app: FastAPI,
    operators: Operators,
    watch: Watch,
    *,
    check_options: Callable[[Sequence[str]], None],
) -> None:
    """Add the routes to the server; without API keys, every caller may use them.

    Args:
        watch: makes the frames of the dashboard.
        check_options: raises ConfigurationError for options that a restart cannot have.
    """

    async def authorize() -> None:
        if not caller().is_operator:
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

    @router.get("/nodes")
    async def list_nodes() -> Response:
        return JSONResponse(operators.list_nodes())

    @router.get("/requests")
    async def list_requests(
        timeout_s: Annotated[float | None, Query(gt=0.0, le=MAX_LAST_S)] = None,
    ) -> Response:
        return JSONResponse(await operators.list_requests(timeout_s))

    @router.get("/explain")
    async def explain(request: str) -> Response:
        return JSONResponse(await operators.explain(request))

    @router.get("/recent")
    async def recent(
        last_s: Annotated[float, Query(gt=0.0, le=MAX_LAST_S)] = 10.0,
    ) -> Response:
        return JSONResponse(await operators.recent(last_s))

    @router.get("/watch")
    async def watch_cluster() -> Response:
        # A proxy must hand on each frame at once.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(watch.events(), media_type=STREAM_TYPE, headers=headers)

    @router.post("/migrate")
    async def migrate(request: Request) -> Response:
        body = await _body(request, MigrateBody)
        reports = await operators.migrate(body.request, body.to, body.mode)
        return JSONResponse(reports if len(reports) != 1 else reports[0])

    @router.post("/drain")
    async def drain(request: Request) -> Response:
        body = await _body(request, DrainBody)
        if body.instance is not None and body.node is None:
            await operators.drain(body.instance, is_undo=body.undo)
        elif body.node is not None and body.instance is None:
            await operators.drain_node(body.node, is_undo=body.undo)
        else:
            raise BadRequestError("name either an instance or a node")
        return JSONResponse(None, HTTPStatus.ACCEPTED)

    @router.post("/start")
    async def start(request: Request) -> Response:
        body = await _body(request, StartBody)
        await operators.start_instances(body.instances)
        return JSONResponse(None, HTTPStatus.ACCEPTED)

    @router.post("/restart")
    async def restart(request: Request) -> Response:
        body = await _body(request, RestartBody)
        # vLLM may read files for the check, and streams must not wait for that.
        await asyncio.to_thread(check_options, body.options)
        begun = await operators.restart(body.options, has_surge=body.surge)
        return JSONResponse(begun, HTTPStatus.ACCEPTED)

    app.include_router(router)
    document = page()

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse(document.html, headers=dict(document.headers))


async def _body(request: Request, kind: type[Body]) -> Body:
    """Return the request's body.

    Raises:
        BadRequestError: the body is not of this kind, or not declared as JSON. Pages of other
            origins could send such a body from a browser.
    """
    kind_of_content = request.headers.get("Content-Type", "").partition(";")[0].strip()
    if kind_of_content != "application/json":
        raise BadRequestError("the body must be JSON, with Content-Type: application/json")
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except UNREADABLE as error:
        raise BadRequestError(str(error)) from error


class _AdminRoute(APIRoute):
    """A route that turns our errors into error objects.

    Exception handlers cannot be added: vLLM's application has been built with its own ones before
    it gets here.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except SternaError as error:
                return _error_response(error)

        return handle_with_errors


def _error_response(error: SternaError) -> Response:
    status = _STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    return error_response(status, str(error))
