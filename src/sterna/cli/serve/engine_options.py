"""Engine of an instance: its model, its share of the machine, and vLLM's own checks."""

import json
import logging
import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from sterna.config import ClusterConfig, Soonest
from sterna.engine.cpu_cores import num_usable_cores
from sterna.engine.model_files import folder_of, has_configuration, weight_bytes_of
from sterna.engine.vllm.guard import is_cpu_build
from sterna.errors import ConfigurationError
from sterna.runtime.processes.limits import available_memory_bytes

SMALL_MODEL_NAME = "SmolLM2-135M-Instruct"
SMALL_MODEL_OPTIONS = {
    "block_size": 32,
    "max_model_len": 8192,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
}
"""Options for the small model where the user gives none."""

SMALL_MODEL_WEIGHT_BYTES = 257 << 20
"""Weights of the small model in 16 bits."""

SMALL_MODEL_KV_CACHE_BYTES = 256 * 1024 * 1024
"""KV cache of an instance of the small model in 16 bits: 11,000 tokens, the smallest memory with
which migrations still occur."""

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""KV cache of an instance on CPU where no option says otherwise and memory allows."""

MIN_KV_CACHE_BYTES = 256 << 20
"""The smallest KV cache with which an instance is useful."""

USABLE_MEMORY_SHARE = 0.9
"""Largest share of the available main memory that instances take together by default."""

USERS_THREADS = "STERNA_OMP_NUM_THREADS"
"""Variable with the user's `OMP_NUM_THREADS`, or nothing; all processes get one of 1 at first."""

USERS_BINDING = "STERNA_VLLM_CPU_OMP_THREADS_BIND"
"""Variable with the user's `VLLM_CPU_OMP_THREADS_BIND`, or nothing: vLLM itself binds none here."""

INSTANCE_OVERHEAD_BYTES = 1200 * 1024 * 1024
"""Main memory of an instance's process besides weights and KV cache, as measured on CPU."""

IN_32_BITS = ("float", "float32")
"""The values of `--dtype` with which each number takes 32 bits."""

logger = logging.getLogger("sterna.serve")


def choose_model(args: Namespace) -> None:
    """Prepare the small model if it is chosen; check the folder of another model."""
    args.model = args.model_tag
    if args.model == SMALL_MODEL_NAME:
        from sterna.demo_model.small_model import default_cache_folder, ensure_small_model

        folder = default_cache_folder(os.environ)
        args.model = str(ensure_small_model(folder, _print_progress))
        if args.served_model_name is None:
            args.served_model_name = [SMALL_MODEL_NAME]
        if args.engine != "emulated":
            from sterna.engine.vllm.facts import lacks_bfloat16

            # The model's weights are bfloat16: prompts would take six times as long.
            if args.dtype == "auto" and lacks_bfloat16():
                args.dtype = "float32"
        if args.engine == "vllm":
            # The same number of tokens in 32 bits, since one request may have 8,192 of them.
            num_halves = 2 if args.dtype in IN_32_BITS else 1
            kv_cache_bytes = num_halves * SMALL_MODEL_KV_CACHE_BYTES
            options = {**SMALL_MODEL_OPTIONS, "kv_cache_memory_bytes": kv_cache_bytes}
            for option, value in options.items():
                if getattr(args, option) is None:
                    setattr(args, option, value)
        args.enforce_eager = True
    args.model_tag = args.model
    path = Path(args.model)
    looks_like_path = args.model.startswith((".", "/", "~")) or path.exists()
    if looks_like_path and not has_configuration(path):
        state = "is not a model folder (no config.json)" if path.exists() else "is not there"
        raise ConfigurationError(f"model {args.model} {state}")


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _loaded_bytes(args: Namespace) -> int:
    """Main memory of the weights: those of 16 bits take twice the size of their files in 32; 0 of a
    model that has not been downloaded yet."""
    try:
        # vLLM keeps a configuration in Hugging Face's own cache.
        its_folder = folder_of(args.model, args.revision, None)
        config = json.loads((its_folder / "config.json").read_bytes())
        stored = config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        stored = None
    is_wider = args.dtype in IN_32_BITS and stored in ("bfloat16", "float16")
    folder = folder_of(args.model, args.revision, args.download_dir)
    return weight_bytes_of(folder) * (2 if is_wider else 1)


def gpus_of(args: Namespace) -> int:
    """Return the number of GPUs of an instance; 0 with vLLM for CPU."""
    if is_cpu_build():
        return 0
    from sterna.engine.vllm.hosted_core import world_size

    return world_size(args)


def share_memory(args: Namespace, num_instances: int, options: str) -> None:
    """Give each instance a part of main memory, or refuse more instances than fit.

    Without a limit, each vLLM on CPU would take nearly all of it.

    Args:
        options: the options that set the number of instances, for the message.
    """
    from sterna.engine.vllm.arguments import leaves_memory_to_vllm
    from sterna.engine.vllm.hosted_core import world_size

    available = available_memory_bytes()
    weights = _loaded_bytes(args)
    num_ranks = world_size(args)
    fixed = weights + INSTANCE_OVERHEAD_BYTES * num_ranks
    if leaves_memory_to_vllm(args) and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        free = int(available * USABLE_MEMORY_SHARE) // num_instances - fixed
        args.kv_cache_memory_bytes = max(
            MIN_KV_CACHE_BYTES, min(DEFAULT_KV_CACHE_BYTES, free // num_ranks)
        )
    if args.kv_cache_memory_bytes is None:
        return
    needed = (fixed + args.kv_cache_memory_bytes * num_ranks) * num_instances
    if needed > available:
        raise ConfigurationError(
            f"{num_instances} instances need about {needed / 2**30:.1f} GiB of memory, "
            f"and {available / 2**30:.1f} GiB are available; lower {options} or "
            "--kv-cache-memory-bytes"
        )


def share_cores(args: Namespace, num_instances: int) -> None:
    """Give each rank of an instance on CPU a part of this machine's cores, all but one of which
    compute; an instance with one thread gets a core of its own, where there are enough.

    An `OMP_NUM_THREADS` of the user holds instead, and so does a `VLLM_CPU_OMP_THREADS_BIND`.

    Raises:
        ConfigurationError: the former is not a number of threads.
    """
    from sterna.engine.vllm.hosted_core import world_size

    num_cores, num_ranks = num_usable_cores(), world_size(args)
    given = os.environ.get(USERS_THREADS, "")
    # OpenMP takes a list as well, whose first number is the one that counts here.
    first = given.partition(",")[0].strip()
    if not given:
        args.num_threads = max(1, (num_cores - 1) // (num_instances * num_ranks))
    elif not first.isdecimal() or int(first) == 0:
        raise ConfigurationError(f"OMP_NUM_THREADS={given}: it must be a number of threads")
    else:
        args.num_threads = int(first)
    # Several threads would all have to be bound, and ranks have processes of their own.
    is_alone = args.num_threads == num_ranks == 1
    args.binds_core = is_alone and num_instances <= num_cores and not os.environ.get(USERS_BINDING)


def checked_engine_config(args: Namespace) -> Any:
    """Return vLLM's configuration of an instance. vLLM checks the options here, and not only after
    every process has been started. Warns of a dtype that makes the engine slow.

    Raises:
        ConfigurationError: vLLM refuses; the message is vLLM's.
    """
    from sterna.engine.vllm.arguments import REFUSALS, vllm_refusal
    from sterna.engine.vllm.facts import computes_in_software
    from sterna.engine.vllm.hosted_core import engine_config

    try:
        config = engine_config(args)
    except REFUSALS as error:
        raise ConfigurationError(vllm_refusal(error)) from error
    if args.emulated is None and computes_in_software(config):
        logger.warning(
            "this CPU has no instructions for bfloat16, the model's dtype: --dtype float32 is "
            "several times as fast"
        )
    return config


def with_prefix_caches(cluster: ClusterConfig, args: Namespace, config: Any) -> ClusterConfig:
    """Return the configuration for engines whose prefix caches the policy can look at, or not.

    Args:
        config: vLLM's configuration of an instance.

    Raises:
        ConfigurationError: the policy is made for prefix caches, and cannot look at them.
    """
    policy = cluster.llumlet.policy
    obstacle = _obstacle_to_caches(args, config) if policy.looks_at_prefixes else None
    if obstacle is None:
        return cluster
    if policy.needs_prefixes:
        raise ConfigurationError(
            f"--policy {policy.name} looks at prefix caches, and {obstacle}, or choose another "
            "policy"
        )
    assert isinstance(policy.dispatch, Soonest)
    logger.info("requests are dispatched without a look at prefix caches: %s", obstacle)
    policy = replace(policy, dispatch=replace(policy.dispatch, looks_at_caches=False))
    return replace(cluster, llumlet=replace(cluster.llumlet, policy=policy))


def _obstacle_to_caches(args: Namespace, config: Any) -> str | None:
    """Return why instances cannot report their prefix caches, and what to do; None: they can."""
    cache = config.cache_config
    is_there = cache.enable_prefix_caching
    if args.emulated is not None:
        is_there = args.emulated.engine.prefix_caching
    if not is_there:
        return "the engines have none: give --enable-prefix-caching"
    algorithm = cache.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        return (
            f"with --prefix-caching-hash-algo {algorithm} the hashes of each process have a random "
            "start: choose sha256_cbor, set PYTHONHASHSEED"
        )
    return None
