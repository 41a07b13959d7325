"""The options of `sterna serve` for its clients: limits, resumable streams and TLS."""

import ssl
from argparse import BooleanOptionalAction, Namespace
from dataclasses import replace
from pathlib import Path

from sterna.cli.options.option_tables import Option, OptionTable, given, naming
from sterna.cli.options.option_values import positive
from sterna.config import DoorConfig
from sterna.errors import ConfigurationError

MIB = 1 << 20

DOOR = OptionTable(
    DoorConfig,
    (
        Option(
            "--max-queued-requests",
            "number of requests that may wait for their first token, where each prompt and each "
            "choice of n counts as one; further requests are answered 429, those above the normal "
            "class only beyond a tenth more; 0: no limit",
            field="max_queued_requests",
            type=int,
            metavar="N",
        ),
        Option(
            "--max-body-mib",
            "answer 413 to a request with a larger body",
            field="max_body_bytes",
            type=positive,
            metavar="MIB",
            unit=MIB,
        ),
        Option(
            "--max-waiting-body-mib",
            "size of the bodies of all requests at one front end whose answers have not begun; "
            "further requests are answered 429",
            field="max_waiting_body_bytes",
            type=positive,
            metavar="MIB",
            unit=MIB,
            unless_given=f"{DoorConfig().max_waiting_body_bytes / MIB:g}, or --max-body-mib, where "
            "that is more",
        ),
        Option(
            "--reader-timeout",
            "disconnect a client that reads less than 48 KiB of its pending answer in this time",
            field="reader_timeout_s",
            type=float,
            metavar="SECONDS",
        ),
        Option(
            "--resumable-streams",
            "let clients whose connection broke resume their streams, by X-Request-Id and "
            "Last-Event-ID, at any front end; with several front ends, also after the death of "
            "the one that served the stream",
            action="store_true",
            default=False,
        ),
        Option(
            "--resume-window",
            "time for which a stream is kept for its client to resume it",
            field="resume_window_s",
            type=float,
            metavar="SECONDS",
            default=60.0,
        ),
        Option(
            "--server-timing",
            "say in a Server-Timing header where the time until the first token went",
            field="has_server_timing",
            action=BooleanOptionalAction,
        ),
    ),
)

CERTIFICATE_OPTIONS = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers")
"""Options of vLLM that need --ssl-certfile."""


def door_config(args: Namespace) -> DoorConfig:
    """Return the limits of front ends for their clients.

    Raises:
        ConfigurationError: a value cannot work.
    """
    if args.max_queued_requests < 0:
        raise ConfigurationError(
            f"--max-queued-requests must be at least 0, not {args.max_queued_requests}"
        )
    values = given(DOOR, args)
    values["max_queued_requests"] = args.max_queued_requests or None
    default_bytes = max(values["max_body_bytes"], DoorConfig().max_waiting_body_bytes)
    values.setdefault("max_waiting_body_bytes", default_bytes)
    with naming(DOOR):
        config = DoorConfig(**values)
    return config if args.resumable_streams else replace(config, resume_window_s=None)


def check_tls(args: Namespace) -> None:
    """Read the certificates of vLLM's TLS options as front ends will, before any process starts:
    otherwise a front end would report an error after every instance has loaded its model.

    Raises:
        ConfigurationError: they cannot be used, or are given without --ssl-certfile.
    """
    if not args.ssl_certfile:
        for name in CERTIFICATE_OPTIONS:
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
