"""Routes: the table of paths, with the access to each and the rules for its requests.

Paths are without the prefix that a proxy may leave before them (`--root-path`), which `Callers`
cuts off. vLLM's own check of keys guards paths that begin with /v1, /v2, /inference or /cohere. It
leaves the same inference open under other names (/invocations, /tokenize), and also the routes that
change the engines in vLLM's development mode. Here a path is for operators unless the table says
otherwise: a path that a later vLLM adds stays closed until it gets a row, unless it has a prefix of
inference (`PREFIXES`), which any key opens, as in vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType


class Access(Enum):
    """The access to a path on a server with API keys."""

    PUBLIC = "no key is needed"
    ANY_KEY = "every key opens it"
    OPERATORS = "operators' keys open it"
    OWN_CHECK = "the application checks keys itself, with answers of its own"


class AtShutdown(Enum):
    """The treatment of requests when the server is about to end."""

    FINISHED = "new ones are refused, the others are answered before the end"
    PROBE = "new ones are refused, so that load balancers see it; the end waits for none"
    AWAITED = "new ones are answered too, and before the end"
    ANSWERED = "new ones are answered too; the end waits for none"


@dataclass(frozen=True, slots=True)
class Route:
    """The rules for one path, or for those below it.

    Attributes:
        is_inference: a POST makes engine requests, which wait in the queue.
        has_tiers: OpenAI's API has `service_tier` there.
        is_resumable: its streams are kept, and can be resumed (`--resumable-streams`).
        is_replicated: another front end keeps a record of such a stream. On other paths, events
            have or may have random ids, which would differ after a takeover.
        aborts_others: it aborts requests of other callers, wherever they are.
    """

    access: Access = Access.OPERATORS
    is_inference: bool = False
    has_tiers: bool = False
    is_resumable: bool = False
    is_replicated: bool = False
    aborts_others: bool = False
    at_shutdown: AtShutdown = AtShutdown.FINISHED


RESPONSES_PATH = "/v1/responses"

_OPEN = Route(Access.PUBLIC)
_PROBE = Route(Access.PUBLIC, at_shutdown=AtShutdown.PROBE)
_WATCHED = Route(Access.PUBLIC, at_shutdown=AtShutdown.ANSWERED)
_USERS = Route(Access.ANY_KEY)
_INFERENCE = Route(Access.ANY_KEY, is_inference=True)
_COMPLETION = Route(
    Access.ANY_KEY, is_inference=True, has_tiers=True, is_resumable=True, is_replicated=True
)
_OPERATORS = Route(Access.OPERATORS)
_ABORT = Route(Access.OPERATORS, aborts_others=True)

ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        "/v1/chat/completions": _COMPLETION,
        "/v1/completions": _COMPLETION,
        "/v1/chat/completions/batch": Route(Access.ANY_KEY, is_inference=True, has_tiers=True),
        RESPONSES_PATH: Route(Access.ANY_KEY, is_inference=True, has_tiers=True, is_resumable=True),
        "/v1/messages": Route(Access.ANY_KEY, is_inference=True, is_resumable=True),
        "/inference/v1/generate": Route(Access.ANY_KEY, is_inference=True, is_resumable=True),
        "/invocations": _INFERENCE,
        "/generative_scoring": _INFERENCE,
        "/pooling": _INFERENCE,
        "/classify": _INFERENCE,
        "/score": _INFERENCE,
        "/rerank": _INFERENCE,
        "/tokenize": _USERS,
        "/detokenize": _USERS,
        "/tokenizer_info": _USERS,
        # Of vLLM's development mode.
        "/abort_requests": _ABORT,
        # Their prefix is that of inference, but they change the engines, or end requests of other
        # callers.
        "/inference/v1/abort_requests": _ABORT,
        "/v1/load_lora_adapter": _OPERATORS,
        "/v1/unload_lora_adapter": _OPERATORS,
        # Public, as in vLLM: probes, metrics, and the description of the API. They show no prompt,
        # no answer and no name of a user.
        "/health": _PROBE,
        "/ping": _PROBE,
        "/load": _PROBE,
        "/version": _PROBE,
        "/metrics": _WATCHED,
        "/metrics/": _WATCHED,
        # The dashboard's page, which has nothing of the cluster in it: that is at /admin/watch.
        "/dashboard": _WATCHED,
        "/docs": _OPEN,
        "/docs/oauth2-redirect": _OPEN,
        "/redoc": _OPEN,
        "/openapi.json": _OPEN,
        # Files of vLLM's API page for browsers without access to the internet
        # (--enable-offline-docs).
        "/static/swagger-ui-bundle.js": _OPEN,
        "/static/swagger-ui.css": _OPEN,
    }
)

PREFIXES: tuple[tuple[str, Route], ...] = (
    # A response in the background, which its client fetches or cancels.
    (f"{RESPONSES_PATH}/", replace(_INFERENCE, at_shutdown=AtShutdown.AWAITED)),
    ("/v1/", _INFERENCE),
    ("/v2/", _INFERENCE),
    ("/inference/", _INFERENCE),
    ("/cohere/", _INFERENCE),
    ("/admin/", Route(Access.OWN_CHECK, at_shutdown=AtShutdown.ANSWERED)),
    ("/admin", Route(at_shutdown=AtShutdown.ANSWERED)),
    ("/metrics", Route(at_shutdown=AtShutdown.ANSWERED)),
)
"""Routes of paths that are not in `ROUTES`: the first prefix that matches counts."""

NO_INFERENCE = (
    "/cancel",
    "/count_tokens",
    "/derender",
    "/render",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""Endings of paths that have a prefix of inference and make no engine request: the first makes
room, the last two change the engines, and the others are work of the front end alone, as /tokenize
is."""


def route_of(path: str) -> Route:
    """Return the rules for this path; unknown paths are for operators."""
    if not path.isprintable():
        # Starlette's patterns match a path with a line feed behind it, too.
        return _OPERATORS
    if path in ROUTES:
        return ROUTES[path]
    route = next((route for prefix, route in PREFIXES if path.startswith(prefix)), _OPERATORS)
    return replace(route, is_inference=False) if path.endswith(NO_INFERENCE) else route
