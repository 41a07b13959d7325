"""Recordings, and the page that shows them."""

import base64
import gzip
import hashlib
import re
from functools import partial
from pathlib import Path

import pytest

from sterna.dashboard import recording
from sterna.dashboard.page import event, page
from sterna.errors import ConfigurationError

HEADER = {"title": "tern", "classes": [["normal", 0]], "names": []}
FRAMES = [{"t": t, "instances": [], "names": []} for t in (0.0, 1.0)]
FIRST = b'{"sterna_recording": 1}\n'
# The same bytes each time, for names of tests have them.
packed = partial(gzip.compress, mtime=0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    recording.write(path, HEADER, FRAMES)
    assert list(recording.read(path)) == [HEADER, *FRAMES]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no gzip", "is no recording of this version"),
        (packed(b'{"sterna_recording": 99}\n'), "is no recording of this version"),
        (packed(b"[1]\n"), "is incomplete or damaged"),
        (packed(b'{"sterna_recording": 1}\n{"t": 0')[:-9], "is incomplete or damaged"),
        (packed(FIRST + b'{"t": 0'), "is incomplete or damaged"),
        (packed(FIRST), "is incomplete or damaged"),
        (packed(FIRST + b'{"title":"","classes":[],"names":[]}\n{}'), "is incomplete"),
        (packed(b""), "is incomplete or damaged"),
        (b"", "is incomplete or damaged"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "run.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason):
        list(recording.read(path))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent/run\.gz cannot be written: No such file"):
        recording.write(tmp_path / "absent" / "run.gz", HEADER, FRAMES)


def test_the_page_loads_nothing_besides_and_runs_no_other_script() -> None:
    document = page()
    policy = document.headers["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", document.html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", document.html)
    assert [link[:10] for link in links] == ["data:image"]
    assert not re.search(r"\son\w+=|\sstyle=", document.html), "the policy forbids these"
    assert "innerHTML" not in document.html, "names of requests come from clients"


def test_an_event_of_the_stream_is_a_line_and_an_empty_one() -> None:
    assert event(b'{"t":1}') == b'data: {"t":1}\n\n'
