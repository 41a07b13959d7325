"""The target load of `sterna serve`: its option's, that of this engine's profile, or the paper's.

An instance that hosts a high priority is kept below it (Section 4.4.2). The paper's 1,600 tokens
hold for LLaMA-7B on an A10 (Section 6.4). Where they are more than half of an instance's memory,
half of the memory takes their place: a target load near or above the whole would leave high
priority with next to no headroom, or none.
"""

import logging
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from sterna.cli.serve.class_files import with_classes
from sterna.config import ClusterConfig, PolicyConfig
from sterna.errors import ConfigurationError
from sterna.types import HIGH

MAX_DEFAULT_SHARE = 0.5
"""Of an instance's memory, the most that the default target load takes."""

logger = logging.getLogger("sterna.serve")


def with_target_load(config: ClusterConfig, args: Namespace, engine: Any) -> ClusterConfig:
    """Return the configuration with the target load of high priority, and log where it is from.

    Classes that give a target load of their own keep it.

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
    if given is not None:
        tokens, origin = given, "--target-load"
    else:
        tokens, origin = _found(args, engine) or _default(args, engine)
    logger.info("target load tokens=%d from=%s", tokens, origin)
    policy = with_classes(replace(policy, target_load_tokens={HIGH: tokens}), args.classes)
    return replace(config, llumlet=replace(config.llumlet, policy=policy))


def _found(args: Namespace, engine: Any) -> tuple[int, str] | None:
    """Return what a profile says and which one; None without one."""
    try:
        return _of_emulated(args) if args.emulated is not None else _of_this_engine(engine)
    except ConfigurationError as error:
        # What can be measured again must not keep a server from starting.
        logger.warning("target load: %s", error)
        return None


def _of_emulated(args: Namespace) -> tuple[int, str] | None:
    """What `sterna profile` wrote into the file that says what to emulate."""
    from sterna.engine.profile_file import read

    path = Path(args.profile)
    measurement = read(path) if path.suffix == ".json" else None
    return None if measurement is None else (measurement.target_load_tokens, str(path))


def _of_this_engine(engine: Any) -> tuple[int, str] | None:
    from sterna.engine.profile_file import find, nearest_difference, path_of
    from sterna.engine.vllm.facts import profile_key
    from sterna.engine.vllm.small_model import default_cache_folder

    folder, key = default_cache_folder(os.environ), profile_key(engine)
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
    paper_tokens = PolicyConfig(name="default").target_load_tokens[HIGH]
    if args.emulated is not None:
        total_tokens = args.emulated.engine.total_tokens
    else:
        from sterna.engine.vllm.facts import total_tokens as total_tokens_of

        total_tokens = total_tokens_of(engine)
    advice = "" if args.emulated is not None else "; `sterna profile` measures this engine's"
    if total_tokens is not None and paper_tokens > MAX_DEFAULT_SHARE * total_tokens:
        tokens = max(1, int(MAX_DEFAULT_SHARE * total_tokens))
        return tokens, f"default (half of the memory, which holds {total_tokens}{advice})"
    return paper_tokens, f"default (the paper's for LLaMA-7B on A10{advice})"
