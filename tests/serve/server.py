"""Server process of a test: `sterna serve`, or plain vLLM to compare with."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.serving.ports import free_port
from sterna.cli.operate.admin_commands import ServerError, ask
from sterna.folders import RUN_FOLDER_VARIABLE
from sterna.runtime.processes.reaper import RUN_ID_VARIABLE

START_TIMEOUT_S = 400.0
"""A start takes half a minute on two free cores; others may be using them."""
HANG_TIMEOUT_S = 300.0
"""No wait of a test takes so long unless something hangs, on a machine however busy."""
END_TIMEOUT_S = 60.0
"""By then a server that was told to end has ended, and so has everything that it started. It takes
a few seconds: what does not end by itself is killed after 13."""
POLL_INTERVAL_S = 0.05
"""Pace of questions about what does not tell by itself."""

MODEL_NAME = "small"
MODEL_OPTIONS = (
    *("--served-model-name", MODEL_NAME),
    *("--max-model-len", "2048"),
    *("--block-size", "32"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
    *("--max-num-batched-tokens", "512"),
    *("--max-num-seqs", "16"),
    "--enforce-eager",
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
"""vLLM's options, for plain vLLM and for Sterna alike."""

ENGINE_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""What Sterna gives its engines, so that plain vLLM computes in the same way."""

UNREADY = (".__init__", ".stand_by", ".start", ".take_over")
"""The call that Ray shows of an actor which does not do its work yet."""

STERNA_IS_READY = re.compile(r"^ready after ")
PLAIN_IS_READY = re.compile(r"Application startup complete")


class ServerProcess:
    """A process in a session of its own, as started from a terminal, with its output."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, port: int = 0
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        """What it printed so far, both streams."""
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._changed = threading.Condition()
        self._num_open = 2
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in (
                (self._process.stdout, self.stdout),
                (self._process.stderr, self.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    @property
    def log(self) -> str:
        """Everything that it printed so far."""
        return "\n".join(self.lines)

    def until_line(self, pattern: str | re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """Wait until it has printed a matching line; fail at once when it ends without."""
        found: list[re.Match[str]] = []

        def is_there() -> bool:
            found.extend(m for m in (re.search(pattern, line) for line in self.lines) if m)
            return bool(found) or self._num_open == 0

        with self._changed:
            self._changed.wait_for(is_there, timeout_s)
        assert found, f"no line like {pattern!r} within {timeout_s:.0f} s:\n{self.log}"
        return found[0]

    def interrupt(self) -> None:
        """Press Ctrl-C: SIGINT for the terminal's whole foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def until_end(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait until the process has ended; returns its status."""
        status = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        assert self._num_open == 0, "descendants live on and hold its output open"
        return status

    def end(self) -> None:
        """End it for good, whatever state it is in."""
        if self._process.poll() is not None:
            return
        family = self.processes()
        self.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for process in family:
                if process.is_running():
                    process.kill()
            self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the process and all its descendants, also those that were given away."""
        own = psutil.Process(self.pid)
        family = {own.pid: own, **{p.pid: p for p in own.children(recursive=True)}}
        run_ids = {run_id for p in family.values() if (run_id := _run_id(p)) is not None}
        for process in psutil.process_iter():
            if _run_id(process) in run_ids and run_ids:
                family[process.pid] = process
        return list(family.values())

    def at_work(self, what: str) -> list[psutil.Process]:
        """Return the processes with this in their command lines, or in the titles that Ray gives
        them, the eldest first; none that is in reserve or has only begun to take its place."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline()).strip()
                if what in command and not command.endswith(UNREADY):
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found)]

    def instance_process(self, instance_id: str) -> psutil.Process:
        """Return the instance's process; waits until the log says which it is."""
        ready = self.until_line(rf"instance {instance_id} pid=(\d+)", HANG_TIMEOUT_S)
        return psutil.Process(int(ready[1]))

    def folder(self) -> Path:
        """Return the one in which all of its processes have theirs."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error, KeyError):
                return Path(process.environ()[RUN_FOLDER_VARIABLE])
        raise AssertionError("no process of it has a folder")

    def memory_folder(self) -> Path:
        """Return the one in which its front ends show each other their metrics."""
        frontend = self.at_work("ray::_FrontendActor")[0]
        for mapping in frontend.memory_maps():
            if mapping.path.endswith(".db"):
                return Path(mapping.path).parent
        raise AssertionError("its front end has no file of metrics")

    # ------------------------------------------------------------------------------- clients

    def client(self, **settings: Any) -> Any:
        """Return OpenAI's client of it, which does not try again by itself."""
        import openai

        settings = {"api_key": "none", "max_retries": 0, "timeout": HANG_TIMEOUT_S, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def stream(self, max_tokens: int = 1500, model: str = MODEL_NAME, **settings: Any) -> Any:
        """Return the chunks of a long answer; the settings are those of `client`."""
        return self.client(**settings).completions.create(
            model=model,
            prompt="Terns",
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )

    def http(self, **settings: Any) -> httpx.Client:
        """Return a plain HTTP client of it."""
        return httpx.Client(base_url=self.url, **{"timeout": HANG_TIMEOUT_S, **settings})

    def instances(self, api_key: str | None = None) -> list[dict[str, Any]]:
        """Return what `sterna instances` shows."""
        return ask(self.url, "GET", "/admin/instances", api_key)

    def requests(self, api_key: str | None = None) -> list[dict[str, Any]]:
        """Return what `sterna requests` shows of those that are on an instance."""
        listed = ask(self.url, "GET", "/admin/requests", api_key)
        return [each for each in listed if each["instance"] is not None]

    def is_empty(self) -> bool:
        """Whether no instance holds a request, a block, a reservation or a migration, and no
        request waits at the scheduler. False while there is no scheduler to ask."""
        held = ("used_tokens", "running", "queuing", "migrating")
        try:
            instances = self.instances()
            is_held = any(instance[each] for instance in instances for each in held)
            return not is_held and not ask(self.url, "GET", "/admin/requests", None)
        except ServerError:
            return False

    def until_freed(self, max_tokens: int) -> None:
        """Wait until it is empty, before its requests could have come to their end of so many
        tokens. Some process of it may have just died."""
        most_tokens = 0

        def is_freed() -> bool:
            nonlocal most_tokens
            try:
                lengths = [each["num_output_tokens"] for each in self.requests()]
                most_tokens = max((most_tokens, *lengths))
                return self.is_empty()
            except (ServerError, httpx.HTTPError):
                return False

        until(is_freed, "all blocks are free again")
        assert most_tokens < max_tokens / 2, "a request went on without its client"

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()


def serve_command(*arguments: str) -> list[str]:
    """Return the command line `sterna serve ...`."""
    return [str(Path(sys.executable).with_name("sterna")), "serve", *arguments]


def begin_sterna(
    *options: str, model: Path | None = None, environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Start `sterna serve` with the shared model options; it is not ready yet."""
    from tests.models import small_model

    port = free_port()
    # A test's server need not wait for streams that the test has left.
    own = ("--port", str(port), "--shutdown-timeout", "0")
    arguments = (str(model or small_model()), *MODEL_OPTIONS, *own, *options)
    return ServerProcess(serve_command(*arguments), environment, port)


def start_sterna(
    *options: str, model: Path | None = None, environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Start `sterna serve` with the shared model options; returns when it is ready."""
    server = begin_sterna(*options, model=model, environment=environment)
    return _until_ready(server, STERNA_IS_READY)


def start_plain(*options: str) -> ServerProcess:
    """Start vLLM's own server with the same model and options; returns when it is ready."""
    from tests.models import small_model

    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(small_model()), "--host", "127.0.0.1", "--port", str(port)),
        *(*MODEL_OPTIONS, *options),
    ]
    return _until_ready(ServerProcess(command, ENGINE_ENVIRONMENT, port), PLAIN_IS_READY)


def start_emulated(*options: str) -> ServerProcess:
    """Start a server whose engines compute nothing, and that cuts requests at its end; returns when
    it is ready."""
    port = free_port()
    own = ("--engine", "emulated", "--port", str(port), "--shutdown-timeout", "0")
    return _until_ready(ServerProcess(serve_command(*own, *options), port=port), STERNA_IS_READY)


def _until_ready(server: ServerProcess, line: re.Pattern[str]) -> ServerProcess:
    try:
        server.until_line(line, START_TIMEOUT_S)
    except BaseException:
        server.end()
        raise
    return server


def until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_TIMEOUT_S) -> None:
    """Ask until the condition holds; for what can only be learnt by asking."""
    deadline_s = time.monotonic() + timeout_s
    pace = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        pace.wait(POLL_INTERVAL_S)


def logged_s(lines: Sequence[str], what: str) -> float:
    """The time of the first line with this in it."""
    line = next(each for each in lines if what in each)
    found = re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", line)
    assert found is not None
    return datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def has_ended(process: psutil.Process) -> bool:
    """Whether it does not act any more; somebody may still have to be told of its end."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _run_id(process: psutil.Process) -> str | None:
    try:
        run_id: str | None = process.environ().get(RUN_ID_VARIABLE)
    except (psutil.Error, OSError):
        return None
    return run_id
