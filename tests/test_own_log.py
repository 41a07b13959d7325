"""Sterna's own log beside a logging configuration of the user's for vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_random_llama

pytestmark = pytest.mark.vllm

TIMEOUT_S = 120.0

START = """
import logging, sys
from sterna.engine.vllm.arguments import make_serve_parser, parse_serve
from sterna.engine.vllm.hosted_core import engine_config
from sterna.runtime.processes.log_lines import configure_logging
ours = logging.getLogger("sterna.instance.shell")
theirs = logging.getLogger("another.library")
configure_logging("INFO")
args = parse_serve(*make_serve_parser(), ["serve", sys.argv[1], "--dtype", "float32"], "none")
args.model = args.model_tag
engine_config(args)
ours.info("a line of ours")
print(theirs.disabled)
"""


def test_lines_are_written_with_a_logging_configuration_that_does_not_name_sterna(
    tmp_path: Path,
) -> None:
    """As in the first example of vLLM's page on logging, which leaves out
    `disable_existing_loggers`."""
    file = tmp_path / "logging.json"
    file.write_text(
        json.dumps(
            {
                "version": 1,
                "handlers": {"lines": {"class": "logging.StreamHandler"}},
                "loggers": {"vllm": {"handlers": ["lines"], "level": "INFO"}},
            }
        )
    )
    model = tiny_random_llama(tmp_path / "tiny", seed=1)
    ended = subprocess.run(
        [sys.executable, "-c", START, str(model)],
        env={**os.environ, "VLLM_LOGGING_CONFIG_PATH": str(file)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    # The file was applied: another library's logger is off.
    assert ended.stdout.split() == ["True"]
    assert "a line of ours" in ended.stderr
