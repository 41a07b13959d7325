"""Options of `sterna serve` alone: the configuration from them, and values that it refuses."""

import argparse
import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from sterna.cli.serve import engine_options, serve_command
from sterna.cli.serve.engine_options import (
    USERS_BINDING,
    USERS_THREADS,
    share_cores,
    share_memory,
    with_prefix_caches,
)
from sterna.cli.serve.serve_command import engine_environment
from sterna.cli.serve.serve_options import TABLES, add_serve_options, cluster_config
from sterna.config import ClusterConfig, OnInstanceFailure, Soonest
from sterna.errors import ConfigurationError
from sterna.priority_classes import DEFAULT_CLASSES


def parsed(*options: str) -> argparse.Namespace:
    """Sterna's own options, for instances that take no memory and no GPU of this machine."""
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    args = parser.parse_args(options)
    args.classes, args.emulated = DEFAULT_CLASSES, object()
    return args


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--cpus-per-instance", "-1", "at least 0, not -1.0"),
        ("--drain-timeout", "0", "positive, not 0.0"),
        ("--frontends", "0", "at least 1, not 0"),
        ("--instance-lease", "1", "at least 2 seconds, not 1.0"),
        ("--instance-timeout", "0.5", "at least 1 second, not 0.5"),
        ("--instances", "0", "at least 1, not 0"),
        ("--max-queued-requests", "-1", "at least 0, not -1"),
        ("--migration-bandwidth-share", "2", "in (0, 1], not 2.0"),
        ("--migration-concurrency", "0", "at least 1, not 0"),
        ("--migration-interval", "0", "positive, not 0.0"),
        ("--migration-threshold", "nan", "at most destination_freeness_steps (nan), not nan"),
        ("--reader-timeout", "0", "positive, not 0.0"),
        ("--resume-window", "0", "positive, not 0.0"),
        ("--step-timeout", "0", "at least 1 second, not 0.0"),
        ("--warm-instances", "-1", "at least 0, not -1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_options_name(
    option: str, value: str, rule: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        cluster_config(parsed(option, value))
    assert str(refused.value) == f"{option} must be {rule}"


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--frontends=3", "num_frontends", 3),
        ("--sterna-log-level=DEBUG", "log_level", "DEBUG"),
        ("--instances=5", "num_instances", 5),
        ("--warm-instances=7", "num_warm_instances", 7),
        ("--cpus-per-instance=0.5", "cpus_per_instance", 0.5),
        ("--max-instances=9", "scaling.max_instances", 9),
        ("--min-instances=2", "scaling.min_instances", 2),
        ("--scale-up-freeness=7", "scaling.low_freeness_steps", 7.0),
        ("--scale-down-freeness=777", "scaling.high_freeness_steps", 777.0),
        ("--scaling-period=7", "scaling.period_s", 7.0),
        ("--scaling-cooldown=7", "scaling.cooldown_s", 7.0),
        ("--no-late-binding", "llumlet.policy.binds_late", False),
        ("--migration-threshold=7", "llumlet.policy.source_freeness_steps", 7.0),
        ("--migration-interval=0.7", "llumlet.policy.round_interval_s", 0.7),
        ("--migration-concurrency=7", "llumlet.policy.num_concurrent_migrations", 7),
        ("--transport=gloo", "transport.kind", "gloo"),
        ("--migration-bandwidth-share=0.7", "transport.bandwidth_share", 0.7),
        ("--drain-timeout=7", "llumlet.drain_limit_s", 7.0),
        ("--max-queued-requests=7", "frontend.door.max_queued_requests", 7),
        ("--max-body-mib=7", "frontend.door.max_body_bytes", 7 << 20),
        ("--max-waiting-body-mib=77", "frontend.door.max_waiting_body_bytes", 77 << 20),
        ("--reader-timeout=7", "frontend.door.reader_timeout_s", 7.0),
        ("--resume-window=7", "frontend.door.resume_window_s", 7.0),
        ("--no-server-timing", "frontend.door.has_server_timing", False),
        ("--instance-timeout=7", "watch.instance_timeout_s", 7.0),
        ("--step-timeout=7", "watch.step_timeout_s", 7.0),
        ("--instance-lease=7", "watch.lease_s", 7.0),
    ],
)
def test_an_option_reaches_its_field(option: str, field: str, value: object) -> None:
    config = cluster_config(parsed("--max-instances=16", "--resumable-streams", option))
    assert attrgetter(field)(config) == value


def test_every_option_for_a_field_is_tried_above() -> None:
    (mark,) = test_an_option_reaches_its_field.pytestmark  # type: ignore[attr-defined]
    tried = {
        (option.partition("=")[0].replace("--no-", "--"), field.rpartition(".")[2])
        for option, field, _ in mark.args[1]
    }
    every = {(each.name, each.field) for table in TABLES for each in table.options}
    assert tried == {(name, field) for name, field in every if field is not None}


@pytest.mark.parametrize(("value", "hands_back"), [("continue", True), ("abort", False)])
def test_requests_of_an_instance_that_dies_continue_or_fail_as_the_option_says(
    value: str, hands_back: bool
) -> None:
    config = cluster_config(parsed("--on-instance-failure", value))
    assert config.frontend.on_instance_failure is OnInstanceFailure(value)
    assert config.llumlet.hands_back is hands_back


def test_what_auto_scaling_refuses_it_refuses_by_the_options_names() -> None:
    with pytest.raises(ConfigurationError) as refused:
        cluster_config(parsed("--max-instances", "8", "--instances", "9"))
    words = "--instances must be between --min-instances (1) and --max-instances (8), not 9"
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("options", "binds_late"),
    [
        ((), True),
        (("--no-late-binding",), False),
        (("--policy", "llumnix"), False),
        (("--policy", "llumnix", "--late-binding"), True),
    ],
)
def test_requests_are_held_as_the_policy_says_or_the_option(
    options: tuple[str, ...], binds_late: bool
) -> None:
    policy = cluster_config(parsed(*options)).llumlet.policy
    assert policy.binds_late is binds_late
    if binds_late:
        assert policy.reserves_after_s == 300, "a large one is not passed over for ever"


def engine(algorithm: str = "sha256", *, is_caching: bool = True) -> SimpleNamespace:
    cache = SimpleNamespace(enable_prefix_caching=is_caching, prefix_caching_hash_algo=algorithm)
    return SimpleNamespace(cache_config=cache)


def on_vllm(*options: str) -> tuple[ClusterConfig, argparse.Namespace]:
    args = parsed(*options)
    config = cluster_config(args)
    args.emulated = None
    return config, args


def test_sternas_policy_looks_at_prefix_caches_where_there_are_any() -> None:
    config, args = on_vllm()
    assert with_prefix_caches(config, args, engine()) == config
    blind = with_prefix_caches(config, args, engine(is_caching=False)).llumlet.policy
    assert not blind.looks_at_prefixes
    assert isinstance(config.llumlet.policy.dispatch, Soonest)
    assert blind.dispatch == replace(config.llumlet.policy.dispatch, looks_at_caches=False)


def test_a_class_needs_prefix_caches_only_where_it_looks_at_them_itself(tmp_path: Path) -> None:
    """With the default base, whose own look at them can be left out."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from sterna.policy.own import Policy\n"
        "class Blind(Policy):\n    pass\n"
        "class Looks(Policy):\n    looks_at_prefixes = True\n"
    )
    config, args = on_vllm("--policy", f"{file}:Blind")
    assert with_prefix_caches(config, args, engine()) == config
    blind = with_prefix_caches(config, args, engine(is_caching=False)).llumlet.policy
    assert not blind.looks_at_prefixes
    assert blind.own == config.llumlet.policy.own
    config, args = on_vllm("--policy", f"{file}:Looks")
    with pytest.raises(ConfigurationError, match="--policy Looks looks at prefix caches"):
        with_prefix_caches(config, args, engine(is_caching=False))


def test_hashes_that_differ_between_processes_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, args = on_vllm()
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unlike = with_prefix_caches(config, args, engine("xxhash"))
    assert not unlike.llumlet.policy.looks_at_prefixes
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert with_prefix_caches(config, args, engine("xxhash")) == config


def test_a_policy_that_is_made_for_prefix_caches_needs_them() -> None:
    config, args = on_vllm("--policy", "dynamo")
    assert with_prefix_caches(config, args, engine()) == config
    with pytest.raises(ConfigurationError, match="--policy dynamo looks at prefix caches"):
        with_prefix_caches(config, args, engine(is_caching=False))


def test_other_policies_do_not_care_for_prefix_caches() -> None:
    config, args = on_vllm("--policy", "llumnix")
    assert with_prefix_caches(config, args, engine(is_caching=False)) == config


def with_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int, **environment: str) -> None:
    monkeypatch.setattr(engine_options, "num_usable_cores", lambda: num_cores)
    for name in (USERS_THREADS, USERS_BINDING):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def of_ranks(num_ranks: int = 1) -> argparse.Namespace:
    return argparse.Namespace(
        tensor_parallel_size=num_ranks, pipeline_parallel_size=1, prefill_context_parallel_size=1
    )


@pytest.mark.parametrize(
    ("num_cores", "num_instances", "num_ranks", "num_threads", "binds_core"),
    [
        (16, 1, 1, 15, False),
        (16, 4, 1, 3, False),
        (16, 16, 1, 1, True),
        (16, 17, 1, 1, False),
        (16, 2, 2, 3, False),
        (2, 1, 1, 1, True),
        (2, 2, 1, 1, True),
        (2, 4, 1, 1, False),
    ],
)
def test_instances_share_all_cores_but_one(
    num_cores: int,
    num_instances: int,
    num_ranks: int,
    num_threads: int,
    binds_core: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_cores(monkeypatch, num_cores)
    args = of_ranks(num_ranks)

    share_cores(args, num_instances)

    assert (args.num_threads, args.binds_core) == (num_threads, binds_core)


@pytest.mark.parametrize(("given", "num_threads"), [("7", 7), ("4,2", 4)])
def test_the_users_number_of_threads_holds(
    given: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, 8, **{USERS_THREADS: given})
    args = of_ranks()

    share_cores(args, 1)

    assert args.num_threads == num_threads


def test_the_users_binding_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2, **{USERS_BINDING: "0-1"})
    args = of_ranks()

    share_cores(args, 1)

    assert not args.binds_core


@pytest.mark.parametrize("given", ["0", "many", "-1"])
def test_a_number_of_threads_that_is_none_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, 8, **{USERS_THREADS: given})

    with pytest.raises(ConfigurationError, match=r"OMP_NUM_THREADS=.* must be a number of threads"):
        share_cores(of_ranks(), 2)


def test_the_users_variables_are_kept_when_the_processes_get_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
    for name in (*names, USERS_THREADS, USERS_BINDING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve_command, "is_cpu_build", lambda: True)
    nothing = engine_environment()
    assert [nothing[name] for name in names] == ["1", "nobind"]
    assert [nothing[name] for name in (USERS_THREADS, USERS_BINDING)] == ["", ""]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-5")
    given = engine_environment()
    assert [given[name] for name in names] == ["1", "0-5"]
    assert [given[name] for name in (USERS_THREADS, USERS_BINDING)] == ["6", "0-5"]
    # A process that has got these keeps them.
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    again = engine_environment()
    assert {name: again[name] for name in given if name in again} == {
        name: given[name] for name in given if name in again
    }


def test_the_seed_of_hashes_is_the_same_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances could not use each other's prefixes, nor the scheduler find them."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED" not in engine_environment()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert engine_environment()["PYTHONHASHSEED"] == "7"


@pytest.fixture
def cached_model(tmp_path: Path) -> Path:
    """The folder of the model terns/arctic in a cache of Hugging Face, without some of the files
    that its repository has."""
    repository = tmp_path / "models--terns--arctic"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    listing = {"format_version": 1, "files": {"README.md": {"size": 9, "blob_id": "1" * 40}}}
    for folder, file, text in (
        ("refs", "main", "0" * 40),
        ("trees", f"{'0' * 40}.json", json.dumps(listing)),
    ):
        (repository / folder).mkdir()
        (repository / folder / file).write_text(text)
    (snapshot / "config.json").write_text('{"dtype": "bfloat16"}')
    return snapshot


def write_sparse(folder: Path, **sizes_gib: int) -> None:
    """Files of these sizes, which take no place on the disk."""
    for name, size_gib in sizes_gib.items():
        with open(folder / name.replace("__", "."), "wb") as file:
            file.truncate(size_gib << 30)


def of_weights(cache: Path) -> argparse.Namespace:
    """The options of two instances whose KV caches take 1 GiB each."""
    args = of_ranks()
    args.model, args.revision, args.download_dir = "terns/arctic", None, str(cache)
    args.dtype, args.kv_cache_memory_bytes, args.gpu_memory_utilization = "auto", 1 << 30, 0.5
    return args


@pytest.mark.vllm
@pytest.mark.parametrize(
    "sizes_gib",
    [
        {"model__safetensors": 3},
        {"pytorch_model__bin": 3, "optimizer__bin": 900},
        {"model-1__safetensors": 1, "model-2__safetensors": 2, "consolidated__safetensors": 900},
    ],
    ids=lambda each: next(iter(each)),
)
def test_weights_in_hugging_faces_cache_count_as_memory(
    cached_model: Path, sizes_gib: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: two instances take 3 GiB of weights, 1 of a KV cache and some of an engine each."""
    write_sparse(cached_model, **sizes_gib)
    args = of_weights(tmp_path)
    monkeypatch.setattr(engine_options, "available_memory_bytes", lambda: 8 << 30)
    with pytest.raises(ConfigurationError, match="2 instances need about 10"):
        share_memory(args, 2, "--instances")
    args.model = "terns/common"
    share_memory(args, 2, "--instances")
