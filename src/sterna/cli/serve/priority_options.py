"""The options of `sterna serve` for priorities: classes, API keys and the target load.

The target load of high priority comes from its option, else from the settings of a custom policy
class, else from this engine's profile, else from the paper (`engine/profiling/target_load.py`). An
instance that hosts a high priority is kept below it (Section 4.4.2).
"""

import hashlib
import logging
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sterna.cli.options.option_tables import Option, OptionTable
from sterna.config import ClusterConfig, PolicyConfig
from sterna.errors import ConfigurationError
from sterna.policy_file import policy_named
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey, PriorityClasses
from sterna.priority_files import KeyFile, read_classes
from sterna.types import HIGH

logger = logging.getLogger("sterna.serve")


PRIORITIES = OptionTable(
    None,
    (
        Option(
            "--priority-classes",
            "file with the classes of requests: a YAML or JSON list of {name, rank, "
            "execution_rank, target_load}",
            metavar="FILE",
            unless_given="high, of rank 1, and normal, of rank 0",
        ),
        Option(
            "--api-keys",
            "file with the keys of the API, read again when it changes: a YAML or JSON list of "
            "{name, key or key_sha256, highest_class, admin}; a key of --api-key may do everything",
            metavar="FILE",
            unless_given="those of --api-key",
        ),
        Option(
            "--target-load",
            "number of tokens in an instance's batch up to which requests of high priority decode "
            "at full speed; the memory above it is the headroom",
            type=int,
            metavar="TOKENS",
            unless_given="what `sterna profile` measured; else 1600, or half of the memory if less",
        ),
    ),
)


def settle_classes(args: Namespace) -> None:
    """Read both files, and choose vLLM's scheduling policy where no option does.

    Leaves `classes` in `args`, `api_key_table`, all keys with those of --api-key, and
    `api_key_file`, the file that may change; None without one.

    Raises:
        ConfigurationError: a file cannot be read, or its content is invalid.
    """
    has_priorities = policy_named(args.policy).has_priorities
    if args.scheduling_policy is None:
        args.scheduling_policy = "priority" if has_priorities else "fcfs"
    classes = DEFAULT_CLASSES
    if "priority_classes" in args:
        classes = read_classes(Path(args.priority_classes))
    is_honoured = has_priorities and args.scheduling_policy == "priority"
    args.classes = replace(classes, are_honoured=is_honoured)
    given = args.api_key or [os.environ.get("VLLM_API_KEY")]
    args.api_key_table = tuple(_own_key(key) for key in given if key)
    args.api_key_file = None
    if "api_keys" in args:
        path = Path(args.api_keys).absolute()
        file = KeyFile(path, args.classes, args.api_key_table)
        args.api_key_table = file.read()
        # A pipe can be read once.
        args.api_key_file = file if path.is_file() else None


def with_classes(policy: PolicyConfig, classes: PriorityClasses) -> PolicyConfig:
    """Return the policy with the target loads of these classes.

    A class above normal without a target load gets the policy's target load for high.
    """
    if not classes.are_honoured:
        return replace(policy, has_priorities=False)
    default_tokens = policy.target_load_tokens.get(HIGH)
    if default_tokens is None:
        return policy
    target_load = MappingProxyType(classes.target_load_tokens(default_tokens))
    return replace(policy, target_load_tokens=target_load)


def _own_key(key: str) -> ApiKey:
    return ApiKey("--api-key", hashlib.sha256(key.encode()).digest(), is_admin=True)


# ---------------------------------------------------------------------------------- target load


def with_target_load(config: ClusterConfig, args: Namespace, engine: Any) -> ClusterConfig:
    """Return the configuration with the target load of high priority, and log its origin.

    Classes of requests with a target load of their own keep it; and a custom policy class keeps
    those of its settings, unless --target-load is given.

    Args:
        engine: vLLM's configuration of an instance.

    Raises:
        ConfigurationError: --target-load is not positive, or is given to a policy without
            priorities.
    """
    policy = config.llumlet.policy
    given: int | None = getattr(args, "target_load", None)
    if given is not None:
        if given < 1:
            raise ConfigurationError(f"--target-load must be at least 1, not {given}")
        if not policy.has_priorities:
            raise ConfigurationError(
                f"--target-load {given}: with --policy {args.policy} and "
                f"--scheduling-policy {args.scheduling_policy} there are no priorities; leave it "
                "out"
            )
    if not policy.has_priorities or not args.classes.take_policys_target_load:
        return config
    from sterna.policy.own import gives_target_load

    if given is not None:
        tokens, origin = given, "--target-load"
    elif gives_target_load(policy):
        loads = ",".join(f"{rank}:{tokens}" for rank, tokens in policy.target_load_tokens.items())
        logger.info("target load tokens=%s from=policy %s", loads or "none", policy.name)
        return config
    else:
        tokens, origin = _found(args, engine) or _default(args, engine)
    logger.info("target load tokens=%d from=%s", tokens, origin)
    policy = with_classes(replace(policy, target_load_tokens={HIGH: tokens}), args.classes)
    return replace(config, llumlet=replace(config.llumlet, policy=policy))


def _found(args: Namespace, engine: Any) -> tuple[int, str] | None:
    """Return the target load of a profile and the profile's name; None without a profile."""
    try:
        return _of_emulated(args) if args.emulated is not None else _of_this_engine(args, engine)
    except ConfigurationError as error:
        # A bad profile must not prevent the start of a server: it can be measured again.
        logger.warning("target load: %s", error)
        return None


def _of_emulated(args: Namespace) -> tuple[int, str] | None:
    """Return the target load in the emulated profile, where `sterna profile` wrote it."""
    from sterna.engine.profiling.target_load import measured_tokens

    tokens = measured_tokens(args.profile)
    return None if tokens is None else (tokens, args.profile)


def _of_this_engine(args: Namespace, engine: Any) -> tuple[int, str] | None:
    from sterna.demo_model.small_model import default_cache_folder
    from sterna.engine.profiling.profile_file import find, nearest_difference, path_of
    from sterna.engine.vllm.facts import profile_key

    folder, key = default_cache_folder(os.environ), profile_key(engine, args.num_threads)
    measurement = find(folder, key)
    if measurement is not None:
        return measurement.target_load_tokens, str(path_of(folder, key))
    nearest = nearest_difference(folder, key)
    if nearest is not None:
        logger.info(
            "target load: the saved profile of this model is of another engine: %s", nearest
        )
    return None


def _default(args: Namespace, engine: Any) -> tuple[int, str]:
    from sterna.engine.profiling.target_load import default_tokens

    if args.emulated is not None:
        total_tokens = args.emulated.engine.total_tokens
    else:
        from sterna.engine.vllm.facts import total_tokens as total_tokens_of

        total_tokens = total_tokens_of(engine)
    advice = "" if args.emulated is not None else "; `sterna profile` measures this engine's"
    tokens = default_tokens(total_tokens)
    if tokens < default_tokens(None):
        return tokens, f"default (half of the memory, which holds {total_tokens}{advice})"
    return tokens, f"default (the paper's for LLaMA-7B on A10{advice})"
