"""Files of traces: those of users, and the data that Sterna contains."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np

from sterna.errors import ConfigurationError
from sterna.workload.curves import RateCurve
from sterna.workload.formats import parse_csv, parse_jsonl
from sterna.workload.rows import Rows

PARSERS = {".csv": parse_csv, ".jsonl": parse_jsonl, ".ndjson": parse_jsonl}
"""The parsers by the ending of a file's name, without .gz."""

_RATES = "servegen/rates_10min.csv.gz"
_WINDOW_S = 600.0


def read_rows(path: Path) -> Rows:
    """Read the requests of a .csv, .jsonl or .ndjson file, each also with .gz.

    Raises:
        ConfigurationError: the file cannot be read, or does not have the format of its name; the
            message has the wrong line.
    """
    ending = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    parse = PARSERS.get(ending.lower())
    if parse is None:
        raise ConfigurationError(
            f"{path}: a trace file's name must end with .csv, .jsonl or .ndjson, or these and .gz"
        )
    try:
        with path.open("rb") as file:
            return parse(_text(file, path.suffix.lower() == ".gz"), str(path))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path} cannot be read: it is not gzip, or damaged") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} cannot be read: it is not UTF-8 text") from error


def packaged_rows(name: str) -> Rows:
    """Read the requests of a file that Sterna contains, by its path below `data`."""
    with resources.as_file(_packaged(name)) as path:
        return read_rows(path)


def daily_curve(model: str) -> RateCurve:
    """Read the request rates of a service over its days, in pieces of ten minutes.

    `model` is one of `sterna.workload.arrivals.DAILY_MODELS`.
    """
    with resources.as_file(_packaged(_RATES)) as path, path.open("rb") as file:
        table = csv.DictReader(_text(file, is_gzip=True))
        rates = [float(row["request_rate"]) for row in table if row["model"] == model]
    return RateCurve(np.full(len(rates), _WINDOW_S), np.array(rates))


def _packaged(name: str) -> Traversable:
    return resources.files("sterna.workload") / "data" / name


def _text(file: io.BufferedReader, is_gzip: bool) -> Iterable[str]:
    # "utf-8-sig" also reads files with a byte order mark, which some spreadsheets write.
    if is_gzip:
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
