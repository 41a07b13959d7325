"""Request ids: from the names that clients and operators use to those of engines. Pure.

A client knows its response's id (`chatcmpl-...`, `cmpl-...`) or the `X-Request-Id` that it sent.
vLLM derives from it one engine request for each prompt and each of `n` choices:

    X-Request-Id     tern
    response id      chatcmpl-tern                    cmpl-tern
    a prompt                                          cmpl-tern-0       (prompt 0 of a batch; other
                                                                        kinds have numbers as well)
    a turn           resp_tern_0                                        (of a tool loop)
    a conversation   chatcmpl-tern_0                                    (of a batch of chats)
    a beam           chatcmpl-tern-DIGITS-beam-0      cmpl-tern-0-DIGITS-beam-0
    engine request   chatcmpl-tern-9f86d081           cmpl-tern-0-9f86d081
    of n choices     2_chatcmpl-tern-9f86d081         2_cmpl-tern-0-9f86d081
    sent again       chatcmpl-tern-9f86d081+1         (`attempts`: its instance died)

Each of these names is accepted; one that stands for several engine requests means all of them.
"""

import re
from collections.abc import Iterable

from sterna.frontend.requests.attempts import ATTEMPT_MARK
from sterna.types import RequestId

# The routes with `n`; on others clients may give names that begin like a choice.
_CHOICE = re.compile(r"^(\d+)_(?=chatcmpl-|cmpl-|generate-tokens-)")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT_NUMBER = re.compile(r"-(?:\d+|prompt-\d+(?:-chunk-\d+)?)$")
_TURN = re.compile(r"_\d+$")
_BEAM = re.compile(r"-[0-9a-f]{32}-beam-\d+$")
_OF_SEVERAL = (
    *("cmpl-", "embd-", "pooling-", "classify-", "score-", "transcribe-", "translate-"),
    *("generative-scoring-", "decision-"),
)
"""Beginnings of the ids of responses for whose prompts vLLM numbers its engine requests."""
_ATTEMPT = re.compile(r"(?<=-[0-9a-f]{8})" + re.escape(ATTEMPT_MARK) + r"\d+$")
_KIND = re.compile(r"^(?:generate-tokens-|generative-scoring-|[a-z]+-|resp_)")


def _names_of(request_id: RequestId, *, strips_turn: bool) -> set[str]:
    """Return every name by which a client or operator may mean this engine request.

    Args:
        strips_turn: whether a number at its end may be that of a turn or of a conversation.
    """
    original = _ATTEMPT.sub("", request_id)
    parent = _CHOICE.sub("", original)
    asked = _RANDOM_SUFFIX.sub("", parent)
    prompt = _BEAM.sub("", asked)
    names = {request_id, original, parent, asked, prompt}
    if prompt.startswith(_OF_SEVERAL):
        names.add(_PROMPT_NUMBER.sub("", prompt))
    elif strips_turn:
        names.add(_TURN.sub("", prompt))
    names |= {_KIND.sub("", name) for name in names if name not in (request_id, original)}
    return {name for name in names if name}


def without_attempt(request_id: RequestId) -> RequestId:
    """Return the engine request's id of which this attempt is one."""
    return RequestId(_ATTEMPT.sub("", request_id)) if ATTEMPT_MARK in request_id else request_id


def client_id(request_id: RequestId) -> str:
    """Return the id by which vLLM's server asked its engine for this engine request."""
    return _RANDOM_SUFFIX.sub("", _CHOICE.sub("", request_id))


def choice_of(request_id: RequestId) -> int:
    """Return the index of the choice that this engine request computes."""
    of_several = _CHOICE.match(request_id)
    return int(of_several[1]) if of_several else 0


def slot_of(request_id: RequestId) -> str:
    """Return a name of the engine request that stays the same if its HTTP request is run again."""
    return _RANDOM_SUFFIX.sub("", request_id)


def name_of_slot(slot: str) -> str:
    """Return the id by which vLLM's server asked its engine for the slot's request."""
    return _CHOICE.sub("", slot)


def meant(name: str, request_ids: Iterable[RequestId]) -> list[RequestId]:
    """Return the requests that the name stands for, in the given order.

    A name that is an engine request's own id means that one alone. Clients may give names that end
    like a turn: a name means turns and conversations only if it means no request as it is.
    """
    ids = list(request_ids)
    if name in ids:
        return [RequestId(name)]
    found = [each for each in ids if name in _names_of(each, strips_turn=False)]
    return found or [each for each in ids if name in _names_of(each, strips_turn=True)]
