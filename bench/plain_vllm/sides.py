"""The servers that are compared: Sterna, and vLLM alone or with its own data parallelism.

All have the same model and the same options of vLLM, so that each replica has the same memory.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.serving.measured import LOGS, Server, started
from sterna.engine.cpu_cores import num_usable_cores, physical_cores
from sterna.errors import ConfigurationError

NUM = "NUM"
"""Stands for the number of replicas in a side's options."""

ENGINE_OPTIONS = (
    *("--served-model-name", "small", "--max-model-len", "2048", "--block-size", "32"),
    *("--max-num-batched-tokens", "512", "--max-num-seqs", "32"),
)
"""Options of vLLM, without the type of numbers and the memory."""

FLOAT32 = ("--dtype", "float32")
"""For processors: many have no instructions for bfloat16, and take eight times as long with it."""

REPLICA_OPTIONS = (*ENGINE_OPTIONS, "--kv-cache-memory-bytes", "128M", *FLOAT32)
"""Those of one of several replicas. The memory is that of about 2,900 tokens of the small model:
one request of the largest length and some short ones."""

STERNA, STERNA_AS_VLLM = "sterna", "sterna, vllm-dp"
VLLM, VLLM_LEAN = "vllm", "vllm, one thread a rank"

VLLM_PROGRAM = (sys.executable, "-m", "bench.plain_vllm.vllm_command", "serve")

QUIET_OPTIONS = ("--uvicorn-log-level", "warning")
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING"}
"""The environment, and the options, with which vLLM writes no line for a request. Both are defaults
of `sterna serve`."""

ONE_INSTANCE: Mapping[str, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {
    VLLM: (VLLM_PROGRAM, QUIET_OPTIONS),
    STERNA: (None, ("--instances", "1")),
}
"""The program of each server with one engine, None for `sterna serve`, and its own options."""

COMPILED = LOGS / "inductor"
"""The folder of what PyTorch has compiled; by default it is in the temporary folder."""

UNBOUND = "nobind"

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": UNBOUND}
"""One thread for each engine, which is bound to no core, by Sterna neither."""


def one_bound_thread(num_replicas: int) -> dict[str, str]:
    """The environment in which each of vLLM's ranks gets what `sterna serve` gives each instance on
    two cores: one thread, on a core of its own if there are enough."""
    cores = physical_cores()[: num_usable_cores()]
    bound = "|".join(map(str, cores[:num_replicas])) if num_replicas <= len(cores) else UNBOUND
    return {**ONE_THREAD, "VLLM_CPU_OMP_THREADS_BIND": bound}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the servers.

    Attributes:
        says: what it is, for the page.
        program: without the model; None for `sterna serve`.
        options: beside `REPLICA_OPTIONS`.
        environment: beside this process's, for a number of replicas.
    """

    name: str
    says: str
    program: tuple[str, ...] | None
    options: tuple[str, ...]
    environment: Callable[[int], Mapping[str, str]] = lambda _: {}

    def replica_options(self, num_replicas: int) -> list[str]:
        """Its own options; of one replica vLLM needs none."""
        if num_replicas == 1 and self.program is not None:
            return []
        return [str(num_replicas) if each == NUM else each for each in self.options]

    @contextlib.contextmanager
    def started(self, model: Path, num_replicas: int, log: Path) -> Iterator[Server]:
        """Run the server for as long as the context lasts.

        Raises:
            ConfigurationError: it did not start; the message says why.
        """
        # Instances lock their cores in the temporary folder: in a common one, another server of
        # Sterna's would have them all, though it is stopped.
        with tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True) as folder:
            environment = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(COMPILED), **QUIET}
            options = (*QUIET_OPTIONS, *REPLICA_OPTIONS, *self.replica_options(num_replicas))
            with started(
                (str(model), *options),
                log,
                program=self.program,
                environment={**environment, **self.environment(num_replicas)},
            ) as server:
                yield server


SIDES: Mapping[str, Side] = {
    each.name: each
    for each in (
        Side(STERNA, "`sterna serve --instances N`", None, ("--instances", NUM)),
        Side(
            STERNA_AS_VLLM,
            "the same with vLLM's balance, and no moves",
            None,
            ("--instances", NUM, "--policy", "vllm-dp"),
        ),
        Side(
            VLLM_LEAN,
            "`vllm serve --data-parallel-size N --api-server-count 1`, with a thread on a core of "
            "its own for each rank, as with Sterna",
            VLLM_PROGRAM,
            ("--data-parallel-size", NUM, "--api-server-count", "1"),
            one_bound_thread,
        ),
        Side(
            VLLM,
            "`vllm serve --data-parallel-size N` as it comes",
            VLLM_PROGRAM,
            ("--data-parallel-size", NUM),
        ),
    )
}
"""By name, in the order of the tables."""


def side(name: str) -> Side:
    """The side of this name.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        return SIDES[name]
    except KeyError:
        raise ConfigurationError(f"there is no {name!r}: choose of {', '.join(SIDES)}") from None
