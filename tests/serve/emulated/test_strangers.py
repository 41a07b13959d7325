"""Who may do what at a server that runs: over HTTPS, with keys, and at its internal ports."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq

from sterna.messages.actors import StartInstances
from sterna.messaging.mailbox import draw_keys
from sterna.messaging.reliable_channel import MESSAGE, Head
from tests.serve.emulated.quick import MODEL, quick_server
from tests.serve.server import ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

KEYS = """
- {name: shop, key: sk-shop}
- {name: operators, key: sk-operators, admin: true}
"""
HELLO = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("strangers")
    (folder / "keys.yaml").write_text(KEYS)
    make_certificate(folder)
    return folder


def make_certificate(folder: Path) -> None:
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", *kind, *subject, *files],
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    options = [
        *("--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem")),
        *("--api-keys", str(folder / "keys.yaml"), "--instances", "2", "--enable-ssl-refresh"),
    ]
    with quick_server(folder, *options, is_tls=True) as server:
        yield server


def client(server: ServerProcess, folder: Path, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    return server.http(verify=context, headers=headers)


def test_https_answers_with_the_certificate_that_was_given(
    server: ServerProcess, folder: Path
) -> None:
    with client(server, folder, "sk-shop") as http:
        answer = http.post("/v1/completions", json=HELLO)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    with httpx.Client(trust_env=False) as trusting_nobody, pytest.raises(httpx.ConnectError):
        trusting_nobody.get(f"{server.url}/health")
    with httpx.Client() as plain, pytest.raises(httpx.TransportError):
        plain.get(f"http://127.0.0.1:{server.port}/health")
    assert "curl https://127.0.0.1" in server.log


def test_a_new_certificate_is_given_to_new_connections(server: ServerProcess, folder: Path) -> None:
    make_certificate(folder)
    renewed = (folder / "cert.pem").read_text()
    address = "127.0.0.1", server.port
    until(lambda: ssl.get_server_certificate(address) == renewed, "it is read again")
    with client(server, folder, "sk-shop") as http:
        assert http.post("/v1/completions", json=HELLO).status_code == 200


def test_the_operators_commands_speak_https_and_need_an_operators_key(
    server: ServerProcess, folder: Path
) -> None:
    def instances(key: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("sterna")), "instances", "--json"]
        environment = {
            **os.environ,
            "STERNA_URL": server.url,
            "STERNA_API_KEY": key,
            "SSL_CERT_FILE": str(folder / "cert.pem"),
        }
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    listed = instances("sk-operators")
    assert [each["id"] for each in json.loads(listed.stdout)] == ["i0", "i1"], listed.stderr
    refused = instances("sk-shop")
    assert refused.returncode != 0
    assert "key of an operator" in refused.stderr


def test_without_a_key_nothing_can_be_asked_or_ordered(server: ServerProcess, folder: Path) -> None:
    with client(server, folder) as http:
        for path in ("/v1/completions", "/invocations", "/tokenize", "/admin/drain"):
            assert http.post(path, json=HELLO).status_code == 401, path
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200


def listening(server: ServerProcess) -> set[tuple[str, int]]:
    """Where the processes of the run listen, Ray's own among them."""
    addresses = set()
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            addresses |= {
                (each.laddr.ip, each.laddr.port)
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            }
    return addresses


def test_whoever_speaks_to_the_internal_ports_orders_nothing(
    server: ServerProcess, folder: Path
) -> None:
    """The order is one that everybody may give who gets a message in: start an instance."""
    head = Head(MESSAGE, b"another mailbox.", 0).encode()
    order = head + msgspec.msgpack.encode(StartInstances("tcp://127.0.0.1:1", 1, 1))
    stranger = draw_keys()
    addresses = listening(server)
    assert {host for host, _ in addresses} == {"127.0.0.1", "::ffff:127.0.0.1"}, "this machine only"
    local = {port for host, port in addresses if host == "127.0.0.1"}
    assert len(local) >= 5, "supervisor, scheduler, two instances and a front end have mailboxes"
    with zmq.Context() as context:
        for host, port in addresses:
            host = host.removeprefix("::ffff:")
            for has_keys in (False, True):
                with context.socket(zmq.PUSH) as push:
                    push.setsockopt(zmq.LINGER, 200)
                    if has_keys:
                        push.setsockopt(zmq.CURVE_PUBLICKEY, stranger.public)
                        push.setsockopt(zmq.CURVE_SECRETKEY, stranger.secret)
                        push.setsockopt(zmq.CURVE_SERVERKEY, stranger.public)
                    push.connect(f"tcp://{host}:{port}")
                    push.send(order)
            with socket.create_connection((host.strip("[]"), port)) as raw:
                raw.sendall(b"\xff" * 10_000)
    with client(server, folder, "sk-operators") as http:
        instances = http.get("/admin/instances").json()
        assert [(each["id"], each["state"]) for each in instances] == [
            ("i0", "running"),
            ("i1", "running"),
        ]
        assert http.post("/v1/completions", json=HELLO).status_code == 200
    assert "Traceback" not in server.log


def test_no_key_is_in_the_log_or_on_a_command_line(server: ServerProcess) -> None:
    lines = []
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    for key in ("sk-shop", "sk-operators"):
        assert not any(key in line for line in (*lines, server.log))
