"""Outputs in JSON, and the pacing of streams of them."""

import json

from sterna.frontend.resumable.pacing import Pacing
from sterna.messages.streams import StreamHead
from sterna.types import FrontendId

HOLDER, BUDDY, THIRD = FrontendId(1), FrontendId(2), FrontendId(3)
REPLICA_TIMEOUT_S = 0.5


class TestPayloads:
    """Outputs in JSON: the request, its tokens, and whether it ends."""

    __test__ = False

    def token_ids_of(self, payload: bytes) -> list[int]:
        return list(json.loads(payload)["tokens"])

    def joined_outputs(self, first: bytes, second: bytes) -> bytes | None:
        one, other = json.loads(first), json.loads(second)
        assert one["request"] == other["request"]
        assert not one["is_finished"]
        tokens = [*one["tokens"], *other["tokens"]]
        return None if 9 in tokens else output(one["request"], tokens, other["is_finished"])

    def renamed_output(self, payload: bytes, request_id: str) -> bytes:
        return output(request_id, **{**json.loads(payload), "request": None})


def output(
    request_id: str, tokens: list[int], is_finished: bool = False, request: None = None
) -> bytes:
    content = {"request": request_id, "tokens": tokens, "is_finished": is_finished}
    return json.dumps(content).encode()


def head(stream_id: str = "tern") -> StreamHead:
    return StreamHead(stream_id, b"owner", "/v1/completions", b"", (), 7)


def pacing(
    frontend_id: FrontendId = HOLDER, buddy: FrontendId | None = BUDDY, max_bytes: int = 1 << 20
) -> Pacing:
    it = Pacing(frontend_id, max_bytes, REPLICA_TIMEOUT_S, TestPayloads())
    it.on_buddy(buddy, 0.0)
    return it
