"""Options of vLLM that a rolling restart may change, by the real parser."""

import argparse
from dataclasses import fields

import pytest

from sterna.errors import ConfigurationError
from sterna.messages.actors import RestartInstances
from sterna.supervisor.core import SupervisorCore
from sterna.supervisor.fleet import Fleet, Member, Phase
from sterna.types import InstanceId

pytestmark = pytest.mark.vllm


def overridden(*options: str, has_key: bool = True) -> dict[str, object]:
    """What a server with a maximum of 8 requests has after a restart with these options."""
    from sterna.engine.vllm.arguments import HARMLESS_OPTIONS, with_options

    before = argparse.Namespace(max_num_seqs=8, port=8000)
    return vars(with_options(before, options, only=None if has_key else HARMLESS_OPTIONS))


def test_given_options_replace_those_of_the_server() -> None:
    assert overridden("--max-num-seqs", "64") == {"max_num_seqs": 64, "port": 8000}
    assert overridden() == {"max_num_seqs": 8, "port": 8000}


def test_a_model_needs_a_key() -> None:
    assert overridden("--model", "other")["model"] == "other"
    with pytest.raises(ConfigurationError, match="give the server an API key"):
        overridden("--model", "other", has_key=False)


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("as_one_word", [True, False])
def test_a_file_of_options_is_refused(tmp_path, has_key: bool, as_one_word: bool) -> None:
    """It may have other contents when an instance reads it, seconds or days later."""
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 64\n")
    options = [f"--config={file}"] if as_one_word else ["--config", str(file)]
    with pytest.raises(ConfigurationError, match="--config is not for a rolling restart"):
        overridden(*options, has_key=has_key)


@pytest.mark.parametrize(
    "option",
    [
        *("--max-model-len=64", "--max-logprobs=64", "--stream-interval=4", "--enable-lora"),
        *("--block-size=64", "--allowed-local-media-path=/", "--port=8001"),
        *("--tensor-parallel-size=2", "--data-parallel-size=2", "--scheduler-cls=a.Scheduler"),
    ],
)
def test_an_option_that_concerns_more_than_the_engines_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match="it concerns more than the engines"):
        overridden(option)


NOT_FOR_RESTARTS = """
_api_process_count _api_process_rank
additional_config aggregate_engine_logging allowed_local_media_path allowed_media_domains
aux_output_config block_size collect_detailed_traces config_format convert
custom_histogram_buckets data_parallel_address data_parallel_backend data_parallel_external_lb
data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_log_stats
disable_sliding_window distributed_executor_backend ec_manager_config ec_transfer_config
elastic_ep_max_dp_size enable_elastic_ep enable_eplb enable_expert_parallel
enable_fault_tolerance enable_lora enable_mfu_metrics enable_mixed_moe_lora_format
enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras enable_prompt_embeds
enable_return_routed_experts enable_sleep_mode enable_tower_connector_lora enable_trace_replay
engram_config eplb_config fail_on_environ_validation fault_tolerance_config generation_config
hf_config_path hf_overrides interleave_mm_strings io_processor_plugin kv_events_config
kv_sharing_fast_prefill kv_transfer_config language_model_only limit_mm_per_prompt
log_config_file log_level logging_config logits_processors logprobs_mode master_addr master_port
max_logprobs max_lora_cls_labels max_model_len max_num_queued_reqs max_num_queued_tokens
media_io_kwargs mm_device_do_normalize mm_encoder_only mm_hasher_algorithm mm_ipc_gpu_memory_gb
mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides nnodes node_rank numa_bind
numa_bind_cpus numa_bind_nodes
otlp_traces_endpoint override_generation_config per_request_spec_decode_metrics
pipeline_parallel_size pooler_config prefill_context_parallel_size
prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit profiler_config
ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin
renderer_num_workers return_sampling_mask runner scheduler_cls scheduling_policy
served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
skip_tokenizer_init sleep_mode_offload_cudagraph sleep_preserve_parameter_names spec_method
spec_model spec_tokens speculative_config stream_interval structured_outputs_config
tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tokens_only
video_pruning_method video_pruning_rate watermark_config weight_transfer_config worker_cls
worker_extension_cls
"""
"""Options of vLLM's engine by which front ends go, or that the server checks when it starts."""


def test_every_option_of_vllms_engine_is_for_restarts_or_not() -> None:
    """A new one must be looked at."""
    from vllm.engine.arg_utils import EngineArgs

    from sterna.engine.vllm.arguments import ENGINE_OPTIONS, HARMLESS_OPTIONS

    others = set(NOT_FOR_RESTARTS.split())
    assert HARMLESS_OPTIONS <= ENGINE_OPTIONS
    assert not ENGINE_OPTIONS & others
    assert ENGINE_OPTIONS | others == {each.name for each in fields(EngineArgs)}


@pytest.mark.parametrize(
    ("before", "options"),
    [
        (("--max-num-seqs=4", "--seed", "1"), ("--max-num-seqs=8",)),
        (("--seed", "-1", "--max-num-seqs", "4"), ("--seed", "-2")),
        (("--enforce-eager", "--no-enforce-eager"), ("--enforce-eager",)),
        (("--cudagraph-capture-sizes", "1", "2"), ("--cudagraph-capture-sizes", "4", "8")),
        (("-O1", "-O=2"), ("-O=3",)),
        (("--compilation-config.mode=1", "--seed=1"), ("--compilation-config.mode=3",)),
        (
            ("--compilation-config.custom_ops+=none", "--seed=1"),
            ("--seed=2", "--compilation-config.custom_ops+=+silu_and_mul"),
        ),
    ],
)
def test_without_the_options_that_are_given_again_a_restart_means_the_same(
    before: tuple[str, ...], options: tuple[str, ...]
) -> None:
    members = {InstanceId("i0"): Member(0, Phase.SERVING)}
    core = SupervisorCore(Fleet(1, members=members, _num_begun=1), {0: before})
    core.on_message(RestartInstances("operator", 1, True, options), 0.0)
    given = core.options[1]
    assert len(given) <= len((*before, *options))
    assert overridden(*given) == overridden(*before, *options)


def test_of_an_option_that_is_given_twice_the_last_one_counts() -> None:
    """The supervisor drops earlier ones."""
    from sterna.engine.vllm.arguments import ENGINE_OPTIONS, make_serve_parser

    _, parser = make_serve_parser()
    actions = {type(each) for each in parser._actions if each.dest in ENGINE_OPTIONS}
    assert actions <= {argparse._StoreAction, argparse.BooleanOptionalAction}, actions
