"""The table of paths: for each, who may ask, and what a request on it brings with it.

Paths count without what a proxy may leave before them (`--root-path`): `Callers` cuts that off.
vLLM's own check of keys guards what begins with /v1, /v2, /inference or /cohere. The same inference
is open to everybody under other names there (/invocations, /tokenize), and so is what changes the
engines in vLLM's development mode. Here a path is an operator's unless the table says otherwise:
what a later vLLM adds is closed until somebody has thought about it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Access(Enum):
    """Who may ask, where the server has API keys."""

    EVERYBODY = "no key is needed"
    ANY_KEY = "every key opens it"
    OPERATORS = "operators' keys open it"
    OWN_CHECK = "the application checks keys itself, and answers in its own words"


class AtShutdown(Enum):
    """What becomes of requests when the server is about to end."""

    FINISHED = "new ones are refused, the others are answered before the end"
    PROBE = "new ones are refused, so that load balancers see it; the end waits for none"
    ANSWERED = "new ones are answered as well; the end waits for none"


@dataclass(frozen=True, slots=True)
class Route:
    """What holds of one path, or of those below it.

    Attributes:
        is_inference: a POST brings the engines requests, which wait in the queue.
        has_tiers: OpenAI's API has `service_tier` there.
        is_resumable: a stream of it is kept, and can be read on (`--resumable-streams`).
        is_replicated: another front end keeps a record of such a stream. The events of others have,
            or may have, random ids, which would be others after a death.
    """

    access: Access = Access.OPERATORS
    is_inference: bool = False
    has_tiers: bool = False
    is_resumable: bool = False
    is_replicated: bool = False
    at_shutdown: AtShutdown = AtShutdown.FINISHED


RESPONSES_PATH = "/v1/responses"

_OPEN = Route(Access.EVERYBODY)
_PROBE = Route(Access.EVERYBODY, at_shutdown=AtShutdown.PROBE)
_METRICS = Route(Access.EVERYBODY, at_shutdown=AtShutdown.ANSWERED)
_USERS = Route(Access.ANY_KEY)
_INFERENCE = Route(Access.ANY_KEY, is_inference=True)
_COMPLETION = Route(
    Access.ANY_KEY, is_inference=True, has_tiers=True, is_resumable=True, is_replicated=True
)
_OPERATORS = Route(Access.OPERATORS)

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
        # They begin as inference does, and change the engines.
        "/v1/load_lora_adapter": _OPERATORS,
        "/v1/unload_lora_adapter": _OPERATORS,
        # For everybody, as in vLLM: probes, scrapers, and what the API looks like. No prompt, no
        # answer and no name of a user is among it.
        "/health": _PROBE,
        "/ping": _PROBE,
        "/load": _PROBE,
        "/version": _PROBE,
        "/metrics": _METRICS,
        "/metrics/": _METRICS,
        "/docs": _OPEN,
        "/docs/oauth2-redirect": _OPEN,
        "/redoc": _OPEN,
        "/openapi.json": _OPEN,
        # What vLLM's page of the API is made of where no browser gets it elsewhere
        # (--enable-offline-docs).
        "/static/swagger-ui-bundle.js": _OPEN,
        "/static/swagger-ui.css": _OPEN,
    }
)

PREFIXES: tuple[tuple[str, Route], ...] = (
    ("/v1/", _INFERENCE),
    ("/v2/", _INFERENCE),
    ("/inference/", _INFERENCE),
    ("/cohere/", _INFERENCE),
    ("/admin/", Route(Access.OWN_CHECK, at_shutdown=AtShutdown.ANSWERED)),
    ("/admin", Route(at_shutdown=AtShutdown.ANSWERED)),
    ("/metrics", Route(at_shutdown=AtShutdown.ANSWERED)),
)
"""For paths that are not in `ROUTES`: the first one that fits holds."""

NO_INFERENCE = (
    "/abort_requests",
    "/cancel",
    "/count_tokens",
    "/derender",
    "/render",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""How paths under the prefixes of inference end that bring the engines no request: the first two
make room, the last two change the engines, and the others are work of the front end alone, as
/tokenize is."""


def route_of(path: str) -> Route:
    """Return what holds of this path, which is an operator's if it is unknown."""
    if path in ROUTES:
        return ROUTES[path]
    route = next((route for prefix, route in PREFIXES if path.startswith(prefix)), _OPERATORS)
    return _USERS if route.is_inference and path.endswith(NO_INFERENCE) else route
