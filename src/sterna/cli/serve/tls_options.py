"""vLLM's options about TLS, checked before anything is started: else a front end would find out,
when every instance has loaded its model."""

import ssl
from argparse import Namespace
from pathlib import Path

from sterna.errors import ConfigurationError

OTHERS = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers")
"""Options that are for the server that `--ssl-certfile` makes of it."""


def check_tls(args: Namespace) -> None:
    """Read the certificates as front ends will.

    Raises:
        ConfigurationError: they cannot be used, or would not be.
    """
    if not args.ssl_certfile:
        for name in OTHERS:
            if getattr(args, name):
                raise ConfigurationError(f"{_option(name)} is for TLS: give --ssl-certfile as well")
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(name, getattr(args, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = _option("ssl_certfile") + (f" and {_option('ssl_keyfile')}" if args.ssl_keyfile else "")
    try:
        # Without a password of our own, OpenSSL would ask the terminal for that of the key.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"{pair}: no certificate with its key: {error}") from error
    name = "ssl_ca_certs"
    try:
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
        name = "ssl_ciphers"
        if args.ssl_ciphers:
            context.set_ciphers(args.ssl_ciphers)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{_option(name)} {getattr(args, name)}: {error}") from error


def _check_readable(name: str, path: str | None) -> None:
    if path is None:
        return
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{_option(name)} {path}: {error.strerror}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
