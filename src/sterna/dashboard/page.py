"""The dashboard's page as a web server sends it.

The page is one document that loads nothing besides. Its headers keep it so: the browser runs the
page's own script and no other, and connects to the page's own server only.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

STREAM_TYPE = "text/event-stream"
"""Content type of the stream that the page reads: a header and frames (`cluster_frames`)."""


@dataclass(frozen=True, slots=True)
class Page:
    """The document and the headers of its response."""

    html: str
    headers: Mapping[str, str]


def page() -> Page:
    """Read the page."""
    html = files(__package__).joinpath("page.html").read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(html, "script"),
        "style-src": _hashes(html, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(html, headers)


def event(data: bytes) -> bytes:
    """One event of the stream; `data` is JSON without line breaks."""
    return b"data: " + data + b"\n\n"


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [hashlib.sha256(each.encode()).digest() for each in texts]
    return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
