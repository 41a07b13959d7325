"""Two servers at one port."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from sterna.errors import ConfigurationError
from sterna.runtime.home import held_port
from sterna.runtime.home.held_port import holding_port


@pytest.mark.parametrize(
    ("first", "second", "is_taken"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "::", True),
        (None, "", True),
        ("127.0.0.1", "10.0.0.7", False),
        ("::1", "127.0.0.1", False),
        ("0", "127.0.0.1", True),
        ("a..b", "127.0.0.1", False),
    ],
)
def test_a_server_starts_where_no_other_one_listens(
    tmp_path: Path, first: str | None, second: str | None, is_taken: bool
) -> None:
    with ExitStack() as servers:
        servers.enter_context(holding_port(first, 8000, tmp_path))
        servers.enter_context(holding_port(second, 8001, tmp_path))
        if is_taken:
            with pytest.raises(ConfigurationError, match="another server of yours"):
                servers.enter_context(holding_port(second, 8000, tmp_path))
        else:
            servers.enter_context(holding_port(second, 8000, tmp_path))
    # What has ended, and what was refused, holds nothing.
    with holding_port(None, 8000, tmp_path):
        pass


def test_a_server_starts_where_nothing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    monkeypatch.setattr(held_port.logger, "warning", lambda text, *_: said.append(text))
    with holding_port("127.0.0.1", 8000, tmp_path / "file"):
        assert said == ["port is not held error=%s"]
