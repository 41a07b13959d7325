"""Front-end server: vLLM's own OpenAI server, unpatched, in front of the router.

It is built from vLLM's own functions instead of `run_server`, for two reasons. `run_server`
installs signal handlers, which only the main thread of a process may do, and an actor must not.
And it starts or awaits engines, while here the router takes the place of one.
"""

import asyncio
import itertools
import logging
import resource
import secrets
import socket
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import vllm.envs as envs
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.config import create_ssl_context
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import NoSignalServer, setup_server, watchdog_loop
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from sterna.config import FrontendConfig
from sterna.engine.emulated.refusals import refusal
from sterna.engine.vllm.arguments import (
    HARMLESS_OPTIONS,
    REFUSALS,
    client_arguments,
    vllm_refusal,
    with_options,
)
from sterna.engine.vllm.hosted_core import engine_config, world_size
from sterna.errors import ConfigurationError
from sterna.folders import private_folder
from sterna.frontend.http.api_keys import ApiKeys
from sterna.frontend.http.door import build_door
from sterna.frontend.http.overload import counted, reserved
from sterna.frontend.http.queue_limit import MOST_OF_ONE, QueueLimit, TooManyAtOnceError
from sterna.frontend.http.request_context import aborts_others, add_engine_request
from sterna.frontend.http.request_errors import raising_failures
from sterna.frontend.http.service_tier import admitted_priority
from sterna.frontend.http.shutdown_gate import Gate
from sterna.frontend.http.slow_clients import ConnectionLimit, with_limits
from sterna.frontend.http.tls import Certificates, behind_tls, reload_certificates
from sterna.frontend.operators.admin_routes import add_admin_routes
from sterna.frontend.operators.watchers import Watch
from sterna.frontend.peers import Peers
from sterna.frontend.vllm_server.pooling_failures import pass_on_reasons
from sterna.frontend.vllm_server.router import MakeExchange, Router
from sterna.messages.actors import Membership
from sterna.messaging.mailbox import Mailbox
from sterna.own_log import keep_loggers
from sterna.priority_classes import PriorityClasses
from sterna.types import FrontendId

if TYPE_CHECKING:
    # Imported only with their options.
    from sterna.frontend.metrics.traces import Traces
    from sterna.frontend.resumable.exchange import StreamExchange

logger = logging.getLogger(__name__)

MAX_NAME = 512
"""Characters of a name that clients may choose: ids of ended requests are kept, those of images are
hashed with each block of the KV cache."""

OWN_DESCRIPTORS = 256
"""Descriptors of a front end itself: files, sockets to the instances, those of vLLM and Ray."""

TRACES_TIMEOUT_S = 2.0
"""Time that the last spans have to get to their collector."""

ADAPTERS_APART = 1 << 12
"""Numbers of LoRA adapters for each front end. vLLM keeps a number in 31 bits, which leaves enough
for half a million front ends, one after the other."""


class ClusterClient(AsyncLLM):  # type: ignore[misc]
    """vLLM's engine client. Its health is that of the cluster.

    Args:
        of_vllm: the arguments of AsyncLLM.
    """

    def __init__(
        self,
        router: Router,
        queue: QueueLimit,
        classes: PriorityClasses,
        *,
        is_emulated: bool,
        **of_vllm: Any,
    ) -> None:
        self._router = router
        self._queue = queue
        self._classes = classes
        self._is_emulated = is_emulated
        super().__init__(client_addresses=router.client_addresses, **of_vllm)
        router.abort_here = self._abort_named
        if self.vllm_config.model_config.runner_type == "pooling":
            pass_on_reasons(self.output_processor)
        if router.streams is not None:
            self._report_sent(router.streams)

    def _report_sent(self, streams: "StreamExchange") -> None:
        """Report each engine request just before it is sent: the router, which gets it, does not
        know of which HTTP request it is."""
        send = self.engine_core.add_request_async

        async def report_and_send(request: EngineCoreRequest) -> None:
            streams.on_sent(request.request_id)
            await send(request)

        self.engine_core.add_request_async = report_and_send

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """See AsyncLLM: it is called before the prompts of a request are made.

        Raises:
            VLLMValidationError: it is for more engine requests than one HTTP request may have.
        """
        if n > MOST_OF_ONE:
            raise VLLMValidationError(str(TooManyAtOnceError(n)))
        super().check_admission(n, request_id)

    async def forget_warm_up(self) -> None:
        """Drop what this process has kept of the images and sounds of its warm-up, as vLLM's server
        does by `reset_mm_cache`. That would also ask each instance, which has got none of them, and
        may be in a long step."""
        self.renderer._join_mm_warmup()
        await self.renderer.clear_mm_cache_async()

    async def add_request(self, *args: Any, priority: int = 0, **kwargs: Any) -> Any:
        """See AsyncLLM. The priority is replaced by that of the request's class."""
        admitted = admitted_priority(priority, self._classes)
        return await super().add_request(*args, priority=admitted, **kwargs)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """See AsyncLLM.

        Raises:
            VLLMValidationError: a name that the client has chosen cannot be kept and shown, or the
                engine, which is emulated, does not support the request. Raised here and not at the
                first output, so that streams get a status of 400 too.
            GracefulHTTPError: too many engine requests would wait.
        """
        _check_name(request_id, "request_id")
        _check_name(kwargs.get("session_id") or "", "session_id")
        _check_hashes(prompt)
        add_engine_request(request_id)
        if self._is_emulated and (refused := refusal(prompt, sampling_params)) is not None:
            parameter, reason = refused
            raise VLLMValidationError(reason, parameter=parameter)
        generate = partial(super().generate, prompt, sampling_params, request_id, *args)
        outputs = self._traced(request_id, generate, kwargs)
        outputs = self._waiting(request_id, raising_failures(outputs), sampling_params.n)
        streams = self._router.streams
        if streams is None:
            return outputs
        is_repeatable = _is_repeatable(sampling_params, self.vllm_config.scheduler_config)
        return streams.paced(request_id, outputs, is_repeatable=is_repeatable)

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """See AsyncLLM.

        Raises:
            VLLMValidationError: a name that the client has chosen cannot be kept and shown.
            GracefulHTTPError: too many engine requests would wait.
        """
        _check_name(request_id, "request_id")
        _check_hashes(prompt)
        add_engine_request(request_id)
        encode = partial(super().encode, prompt, pooling_params, request_id, *args)
        outputs = self._traced(request_id, encode, kwargs)
        return self._waiting(request_id, outputs, 1)

    def _traced(
        self,
        name: str,
        answer: Callable[..., AsyncGenerator[Any, None]],
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        """The answer, in a span of its own if there are traces."""
        traces = self._router.traces
        if traces is None:
            return answer(**kwargs)

        async def traced() -> AsyncGenerator[Any, None]:
            with traces.request(name, kwargs.get("trace_headers")) as headers:
                async with aclosing(answer(**{**kwargs, "trace_headers": headers})) as outputs:
                    async for output in outputs:
                        yield output

        return traced()

    def _waiting(
        self, name: str, outputs: AsyncGenerator[Any, None], num_choices: int
    ) -> AsyncGenerator[Any, None]:
        try:
            full = reserved(self._queue, num_choices)
        except TooManyAtOnceError as error:
            raise VLLMValidationError(str(error)) from None
        if full is not None:
            raise GracefulHTTPError("too many requests wait", HTTPStatus.TOO_MANY_REQUESTS)
        return counted(self._queue, name, outputs, num_choices)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """See AsyncLLM. The routes that abort requests of other callers mean those of all front
        ends."""
        names = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        await self._abort(names, is_internal=internal)
        if aborts_others():
            # By ids that only its own client knows, vLLM's server aborts all requests.
            self._router.abort_elsewhere(None if internal else tuple(filter(_is_name, names)))

    async def _abort_named(self, names: tuple[str, ...] | None) -> None:
        """Carry out the abort of another front end: see `AbortNamed`."""
        if names is None:
            requests = self.output_processor
            every = (*requests.request_states, *requests.parent_requests)
            await self._abort(every, is_internal=True)
        else:
            await self._abort(names, is_internal=False)

    async def _abort(self, names: tuple[str, ...], *, is_internal: bool) -> None:
        """Abort requests as AsyncLLM does, but for the router: it must know these engine requests
        before their abort reaches it, since those that end at a stop string are aborted too, though
        not by this method."""
        request_ids = self.output_processor.abort_requests(names, is_internal)
        self._router.on_clients_left(request_ids)
        await self.engine_core.abort_requests_async(request_ids)

    async def check_health(self) -> None:
        """See AsyncLLM.

        Raises:
            EngineDeadError: no instance lives, so `/health` answers 503.
        """
        await super().check_health()
        if not self._router.peers.instances:
            raise EngineDeadError


class FrontendServer:
    """Answers HTTP until stopped.

    Args:
        args: the options of `vllm serve`; `frontends`: number of servers that share the port;
            `emulated`: the engine that instances emulate, or None; `classes` of requests;
            `api_key_table`: the keys of all callers, with those of `api_key`; and `api_key_file`:
            the file that may change them, or None.
        mailbox: receives the cluster's messages for this front end, the membership among them.
        ready: the facts of an instance's engine (`EngineFacts.ready`).
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        args: Namespace,
        config: FrontendConfig,
        mailbox: Mailbox,
        ready: bytes,
    ) -> None:
        self._frontend_id = frontend_id
        self._args = args
        self._config = config
        self._mailbox = mailbox
        self._ready = ready
        self._listening = asyncio.Event()
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._gate: Gate | None = None
        self._router: Router | None = None
        self._queue = QueueLimit(config.door.max_queued_requests, config.door.urgent_reserve)

    @property
    def membership(self) -> Membership | None:
        """The newest membership that has arrived; None while HTTP is not answered."""
        if self._router is None or not self._listening.is_set():
            return None
        return self._router.peers.membership

    async def start(self) -> None:
        """Return when HTTP requests are answered, or raise the error that prevents it."""
        self._serving = asyncio.create_task(self._serve())
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self._serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.is_set():
            listening.cancel()
            await self._serving

    async def wait(self) -> None:
        """Return when the server has been stopped; raise any other cause of its end."""
        assert self._serving is not None, "start() comes first"
        await asyncio.shield(self._serving)

    async def finish_requests(self, timeout_s: float) -> int:
        """Refuse new requests, and wait for the answers under way; returns how many are left at
        the time-out."""
        if self._gate is None:
            return 0
        self._gate.close()
        return 0 if await self._gate.emptied(timeout_s) else self._gate.num_inside

    async def stop(self) -> None:
        """Stop answering; open connections may end within `shutdown_timeout_s`."""
        self._stopping.set()
        if self._serving is not None:
            if not self._listening.is_set():
                self._serving.cancel()
            await asyncio.wait({self._serving})

    async def _serve(self) -> None:
        keys = ApiKeys(self._args.api_key_table, self._args.api_key_file)
        # A front end may start long after the server.
        await keys.look()
        with private_folder("frontend") as folder:
            # Its imports take long.
            traces = await asyncio.to_thread(self._make_traces)
            router = Router(
                self._frontend_id,
                self._config,
                self._mailbox,
                self._ready,
                Path(folder),
                self._args.classes,
                self._queue,
                self._make_exchange(),
                traces,
            )
            self._router = router
            # After an error others must know at once that this front end has ended.
            wait_s = 0.0
            try:
                await _until_first_ends(router.run(), keys.follow(), self._serve_http(router, keys))
                wait_s = TRACES_TIMEOUT_S
            finally:
                router.close()
                if traces is not None:
                    await asyncio.to_thread(traces.close, wait_s)

    async def _serve_http(self, router: Router, keys: ApiKeys) -> None:
        _, sock = setup_server(self._args, reuse_port=self._args.frontends > 1)
        with sock:
            # vLLM's client begins with a utility call, which an instance must answer.
            await router.peers.served()
            if router.streams is not None:
                # One that did not know this front end would call its streams unknown.
                await router.streams.introduce()
            client = make_client(self._args, router, self._queue)
            try:
                await client.forget_warm_up()
                tasks = await client.get_supported_tasks()
                app = _vllms_app(self._args, tasks, client, keys)
                only = None if keys.are_needed else HARMLESS_OPTIONS
                model = client.vllm_config.model_config.served_model_name
                watch = Watch(router.operators, model, self._args.classes)
                add_admin_routes(
                    app,
                    router.operators,
                    watch,
                    check_options=partial(self._check_engine_options, only),
                )
                await init_app_state(client, app.state, _without_cached_queries(self._args), tasks)
                router.utilities.is_starting = False
                number_adapters_apart(app.state.openai_serving_models, self._frontend_id)
                count_all_ranks(app, world_size(self._args), router.peers)
                door = build_door(
                    app,
                    AuthenticationMiddleware,
                    keys,
                    self._args.classes,
                    self._queue,
                    self._config.door,
                    self._args.root_path or "",
                    self._keep_streams(router),
                    router.timing if self._config.door.has_server_timing else None,
                    _background_responses(app),
                    has_operators_middleware=bool(self._args.middleware),
                )
                self._gate = door.gate
                await self._answer(door.app, app, client, sock, watch)
            finally:
                client.shutdown(timeout=0)

    def _make_traces(self) -> "Traces | None":
        """Return the export of traces; None without `--otlp-traces-endpoint`."""
        endpoint = self._args.otlp_traces_endpoint
        if endpoint is None:
            return None
        from vllm.tracing.otel import get_span_exporter

        from sterna.frontend.metrics.traces import Traces

        return Traces(get_span_exporter(endpoint), self._frontend_id)

    def _make_exchange(self) -> MakeExchange | None:
        """Return a factory for the exchange of streams; None if streams stay at their front end."""
        door = self._config.door
        if door.resume_window_s is None or self._args.frontends == 1:
            return None
        # Modules of resumable streams are imported only with them.
        from sterna.frontend.resumable.exchange import StreamExchange

        return partial(StreamExchange, self._frontend_id, door.max_kept_bytes)

    def _keep_streams(self, router: Router) -> Callable[[ASGIApp], ASGIApp] | None:
        """Return a wrapper that keeps the streams of an application; None without the option."""
        door = self._config.door
        if door.resume_window_s is None:
            return None
        from sterna.frontend.resumable.middleware import ResumableStreams

        return partial(
            ResumableStreams,
            window_s=door.resume_window_s,
            max_bytes=door.max_kept_bytes,
            exchange=router.streams,
        )

    def _check_engine_options(self, only: frozenset[str] | None, options: Sequence[str]) -> None:
        """Raises ConfigurationError: instances could not be restarted with these options."""
        if options and self._args.emulated is not None:
            raise ConfigurationError("an emulated engine has no options that could be changed")
        try:
            engine_config(with_options(self._args, options, only=only))
        except REFUSALS as error:
            raise ConfigurationError(vllm_refusal(error)) from error

    async def _answer(
        self, door: ASGIApp, app: FastAPI, client: AsyncLLM, sock: socket.socket, watch: Watch
    ) -> None:
        config, certificates = _http_config(door, self._args, self._config)
        app.state.server = server = _Server(config, self._listening)
        companions = [
            asyncio.create_task(watchdog_loop(server, client)),
            asyncio.create_task(self._stop_when_told(server, watch)),
        ]
        if certificates is not None and self._args.enable_ssl_refresh:
            files = self._args.ssl_certfile, self._args.ssl_keyfile, self._args.ssl_ca_certs
            paths = [each for each in files if each is not None]
            companions.append(asyncio.create_task(reload_certificates(certificates, paths)))
        try:
            await server.serve(sockets=[sock])
        finally:
            for task in companions:
                task.cancel()
        if not self._stopping.is_set():
            raise RuntimeError("vLLM's server ended by itself; its log says why")

    async def _stop_when_told(self, server: uvicorn.Server, watch: Watch) -> None:
        await self._stopping.wait()
        watch.close()
        server.should_exit = True


def _vllms_app(args: Namespace, tasks: tuple[Any, ...], client: AsyncLLM, keys: ApiKeys) -> FastAPI:
    """Return vLLM's application; if there are keys, with vLLM's check of keys, whose place in the
    chain `KeyCheck` takes."""
    if keys.are_needed:
        # vLLM adds its check only with a key of its own. A secret one, so that no caller could get
        # in if vLLM's check were not replaced.
        args = Namespace(**{**vars(args), "api_key": [secrets.token_urlsafe()]})
    app: FastAPI = build_app(args, tasks, client.model_config)
    return app


def _without_cached_queries(args: Namespace) -> Namespace:
    """Return the options with which vLLM's server scores documents here, from the embeddings of
    their tokens. Otherwise workers would, each from the query's embeddings, which only the worker
    has that computed them, while documents go to all instances."""
    return Namespace(**{**vars(args), "enable_flash_late_interaction": False})


def _background_responses(app: FastAPI) -> Mapping[str, asyncio.Task[None]]:
    """Return the tasks of vLLM's server that make responses in the background, by their ids: those
    under way. A model that generates no text has none."""
    responses = getattr(app.state, "openai_serving_responses", None)
    tasks: Mapping[str, asyncio.Task[None]] = (
        {} if responses is None else responses.background_tasks
    )
    return tasks


def number_adapters_apart(models: Any, frontend_id: FrontendId) -> None:
    """Make vLLM's server give the LoRA adapters that it loads from now on numbers that no other
    front end gives.

    Engines keep adapters by number, without regard to names. If two front ends gave the same number
    to different adapters, requests for the second one would be answered with the weights of the
    first. Adapters of the start (`--lora-modules`) have the same numbers everywhere.
    """
    models.lora_id_counter.inc(frontend_id * ADAPTERS_APART)


def count_all_ranks(app: FastAPI, num_ranks: int, peers: Peers) -> None:
    """Make `/get_world_size`, in vLLM's development mode, count the ranks of all instances: a
    trainer of weights asks for it. vLLM's own route counts those in the server's configuration,
    which has one (`client_arguments`).

    Args:
        num_ranks: of each instance.
    """
    path = "/get_world_size"
    others = [each for each in app.router.routes if getattr(each, "path", None) != path]
    if len(others) == len(app.router.routes):
        return

    async def get_world_size(include_dp: bool = True) -> dict[str, int]:
        num_instances = len(peers.instances) if include_dp else 1
        return {"world_size": num_ranks * num_instances}

    app.router.routes[:] = others
    app.add_api_route(path, get_world_size)


class _Server(NoSignalServer):  # type: ignore[misc]
    """vLLM's server, which sets an event when it listens."""

    def __init__(self, config: uvicorn.Config, listening: asyncio.Event) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()


def make_client(args: Namespace, router: Router, queue: QueueLimit) -> ClusterClient:
    """Return vLLM's client, connected to the router instead of an engine; it loads the tokenizer
    but no weights.

    Raises:
        ValueError: vLLM refuses the options; the message is vLLM's.
    """
    engine_args = client_arguments(args)
    # With one client and one engine, vLLM keeps a cache of sent images in step between the two, and
    # sends references. No instance has got all images, so each must be sent whole.
    engine_args._api_process_count = max(2, args.frontends)
    engine_args._api_process_rank = 0
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    return ClusterClient(
        router,
        queue,
        args.classes,
        is_emulated=args.emulated is not None,
        vllm_config=vllm_config,
        executor_class=Executor.get_class(vllm_config),
        usage_context=UsageContext.OPENAI_API_SERVER,
        log_requests=engine_args.enable_log_requests,
        log_stats=not engine_args.disable_log_stats,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        client_count=args.frontends,
    )


def _http_config(
    app: ASGIApp, args: Namespace, ours: FrontendConfig
) -> tuple[uvicorn.Config, Certificates | None]:
    """Return uvicorn's configuration as vLLM makes it, with the limits for connections, and the
    certificates, which `tls` uses here instead of uvicorn."""
    log_config = get_uvicorn_log_config(args)
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=ours.shutdown_timeout_s,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        **({} if log_config is None else {"log_config": log_config}),
    )
    # Both vLLM's configuration of the engine and uvicorn's may have applied a file of the user's.
    keep_loggers()
    config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
    config.h11_max_header_count = args.h11_max_header_count
    config.load()
    door = ours.door
    connection_limit = ConnectionLimit(_max_connections())
    config.http_protocol_class = with_limits(
        config.http_protocol_class, connection_limit, door.head_timeout_s, door.reader_timeout_s
    )
    if not config.is_ssl:
        return config, None
    config.ssl = None
    certificates = Certificates(
        lambda: create_ssl_context(
            certfile=args.ssl_certfile,
            keyfile=args.ssl_keyfile,
            password=None,
            ssl_version=config.ssl_version,
            cert_reqs=args.ssl_cert_reqs,
            ca_certs=args.ssl_ca_certs,
            ciphers=args.ssl_ciphers,
        )
    )
    config.http_protocol_class = behind_tls(
        config.http_protocol_class, certificates, connection_limit, door.handshake_timeout_s
    )
    return config, certificates


def _check_name(name: str, parameter: str) -> None:
    """Raise VLLMValidationError where a client has chosen one that cannot be kept and shown."""
    if not _is_name(name):
        raise VLLMValidationError(
            f"{parameter} must have at most {MAX_NAME} characters, all of them printable",
            parameter=parameter,
        )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable()


def _check_hashes(prompt: Any) -> None:
    """Do the same for what stands for the images and the like of a processed prompt, which may be
    ids of the client's."""
    hashes = prompt.get("mm_hashes") if isinstance(prompt, Mapping) else None
    for name in itertools.chain.from_iterable((hashes or {}).values()):
        _check_name(name or "", "uuid")


def _is_repeatable(sampling_params: Any, scheduler: Any) -> bool:
    """Return whether each output of the engine becomes exactly one output of `generate`."""
    is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
    interval = max(sampling_params.stream_interval or 1, scheduler.stream_interval)
    return is_delta and interval == 1


def _max_connections() -> int:
    """Return the limit for client connections. It leaves descriptors for the process itself: a peer
    that cannot be reached is worse than a client that is refused."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, soft - OWN_DESCRIPTORS)


async def _until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run these concurrently; when one ends, cancel the others, and raise its error, if any."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
