"""What is refused of TLS before instances are started."""

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from sterna.cli.serve.door_options import check_tls
from sterna.errors import ConfigurationError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a certificate, its key, the same encrypted, another key, and what is none of it."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem")
    openssl("req", "-x509", *kind, *names)
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "other.pem")
    openssl("ec", "-in", "key.pem", "-aes256", "-passout", "pass:tern", "-out", "encrypted.pem")
    (folder / "text.pem").write_text("terns")
    return folder


def options(folder: Path, **given: str) -> Namespace:
    none = dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"))
    paths = {
        name: value if name == "ssl_ciphers" else folder / value for name, value in given.items()
    }
    return Namespace(**{**none, **{name: str(value) for name, value in paths.items()}})


def test_a_certificate_with_its_key_is_taken(folder: Path) -> None:
    check_tls(options(folder))
    check_tls(options(folder, ssl_certfile="cert.pem", ssl_keyfile="key.pem"))
    pair = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}
    check_tls(options(folder, **pair, ssl_ca_certs="cert.pem", ssl_ciphers="HIGH"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile is for TLS: give --ssl-certfile as well"),
        ({"ssl_ca_certs": "cert.pem"}, "--ssl-ca-certs is for TLS: give --ssl-certfile as well"),
        ({"ssl_certfile": "gone.pem", "ssl_keyfile": "key.pem"}, "gone.pem: No such file"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "gone.pem"}, "gone.pem: No such file"),
        ({"ssl_certfile": "cert.pem"}, "--ssl-certfile: no certificate with its key"),
        (
            {"ssl_certfile": "cert.pem", "ssl_keyfile": "other.pem"},
            "--ssl-certfile and --ssl-keyfile: no certificate with its key",
        ),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "encrypted.pem"}, "with its key"),
        ({"ssl_certfile": "text.pem", "ssl_keyfile": "key.pem"}, "with its key"),
        (
            {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "text.pem"},
            "--ssl-ca-certs",
        ),
        (
            {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ciphers": "terns"},
            "--ssl-ciphers terns",
        ),
    ],
)
def test_what_no_front_end_could_answer_with_is_refused(
    folder: Path, given: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_tls(options(folder, **given))
