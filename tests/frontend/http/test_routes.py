"""The table of paths: what holds of those that it names, and of all others."""

from dataclasses import replace

import pytest

from sterna.frontend.http.routes import ROUTES, Access, AtShutdown, Route, route_of

OPERATORS = Route(Access.OPERATORS)
OPERATORS_ALWAYS = Route(Access.OPERATORS, at_shutdown=AtShutdown.ANSWERED)
ABORT = Route(Access.OPERATORS, aborts_others=True)
USERS = Route(Access.ANY_KEY)
INFERENCE = Route(Access.ANY_KEY, is_inference=True)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/embeddings", INFERENCE),
        ("/v2/rerank", INFERENCE),
        ("/cohere/v2/chat", INFERENCE),
        ("/inference/v1/generate/", INFERENCE),
        ("/v1/responses/resp_1", replace(INFERENCE, at_shutdown=AtShutdown.AWAITED)),
        ("/v1/responses/resp_1/cancel", replace(USERS, at_shutdown=AtShutdown.AWAITED)),
        ("/v1/chat/completions/render", USERS),
        ("/v2/load_lora_adapter", USERS),
        ("/v1/load_lora_adapter", OPERATORS),
        ("/inference/v1/abort_requests", ABORT),
        ("/abort_requests", ABORT),
        ("/inference/v1/abort_requests\n", OPERATORS),
        ("/v1/load_lora_adapter\n", OPERATORS),
        ("/v1/chat/completions\n", OPERATORS),
        ("/invocations/cancel", OPERATORS),
        ("/v1", OPERATORS),
        ("/what-a-later-vllm-adds", OPERATORS),
        ("", OPERATORS),
        ("/admin/drain", Route(Access.OWN_CHECK, at_shutdown=AtShutdown.ANSWERED)),
        ("/admin", OPERATORS_ALWAYS),
        ("/adminx", OPERATORS_ALWAYS),
        ("/metricsx", OPERATORS_ALWAYS),
        ("/metrics/", Route(Access.PUBLIC, at_shutdown=AtShutdown.ANSWERED)),
        ("/health", Route(Access.PUBLIC, at_shutdown=AtShutdown.PROBE)),
        ("/health/", OPERATORS),
    ],
)
def test_the_most_precise_rule_holds(path: str, route: Route) -> None:
    assert route_of(path) == route


def test_what_has_tiers_or_is_kept_is_inference_and_only_what_is_kept_has_replicas() -> None:
    having = {
        trait: {path for path, route in ROUTES.items() if getattr(route, trait)}
        for trait in ("is_inference", "has_tiers", "is_resumable", "is_replicated")
    }
    completions = {"/v1/chat/completions", "/v1/completions"}
    assert having["is_replicated"] == completions
    assert having["is_replicated"] < having["is_resumable"] < having["is_inference"]
    assert having["has_tiers"] == {*completions, "/v1/chat/completions/batch", "/v1/responses"}
    assert having["is_inference"] == {
        *(*having["has_tiers"], "/v1/messages", "/inference/v1/generate", "/invocations"),
        *("/generative_scoring", "/pooling", "/classify", "/score", "/rerank"),
    }


def test_everybody_sees_probes_metrics_and_the_description_of_the_api_and_nothing_else() -> None:
    assert {path for path, route in ROUTES.items() if route.access is Access.PUBLIC} == {
        *("/health", "/ping", "/load", "/version", "/metrics", "/metrics/"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/dashboard"),
        *("/static/swagger-ui-bundle.js", "/static/swagger-ui.css"),
    }
