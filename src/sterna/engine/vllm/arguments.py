"""Command line of `vllm serve`, to which Sterna adds its options."""

import argparse
import difflib
import itertools
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NoReturn

import vllm.envs as envs
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sterna.errors import ConfigurationError

try:
    from vllm.entrypoints.common import cli_args
except ImportError:
    # Up to vLLM 0.32.
    from vllm.entrypoints.launchers import cli_args


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS_OPTIONS = _names(
    """
    dtype enable_chunked_prefill enable_prefix_caching enforce_eager gpu_memory_utilization
    kv_cache_dtype kv_cache_memory_bytes max_num_batched_tokens max_num_seqs num_gpu_blocks_override
    seed
    """
)
"""Options of engines alone that load no code and no file of the caller's choice."""

ENGINE_OPTIONS = HARMLESS_OPTIONS | _names(
    """
    all2all_backend allow_deprecated_quantization async_scheduling attention_backend
    attention_config code_revision compilation_config cp_kv_cache_interleave_size
    cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cudagraph_capture_sizes
    cudagraph_metrics dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
    dcp_kv_cache_interleave_size dcp_q_replicate disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization
    distributed_timeout_seconds download_dir dp_sync_interval enable_batch_sharded_sampling
    enable_cumem_allocator enable_dbo enable_ep_weight_filter enable_flashinfer_autotune
    enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
    enable_nccl_comm_suspend enable_shm_tensor_arena expert_placement_strategy fully_sharded_loras
    gdn_prefill_backend hf_token ignore_patterns ir_op_priority jit_monitor_mode jit_monitor_verbose
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype_skip_layers kv_cache_metrics
    kv_cache_metrics_sample kv_offloading_backend kv_offloading_size linear_backend load_format
    long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype
    lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras
    max_cudagraph_capture_size max_lora_rank max_loras max_num_active_seqs max_num_scheduled_tokens
    max_parallel_loading_workers mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_tp_mode model model_impl model_loader_extra_config model_weights moe_backend
    offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
    optimization_level performance_mode prefill_schedule_interval pt_load_map_location quantization
    quantization_config
    replayssm_buffer_len revision safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads scheduler_reserve_full_isl sparse_indexer_topk_backend
    specialize_active_lora swa_bounded_replay trust_remote_code ubatch_size use_fp64_gumbel
    use_replayssm use_tqdm_on_load watermark
    """
)
"""Options of vLLM that concern nothing but engines, so that a rolling restart may change them: of
weights, the scheduler, the KV cache, the computation of a step, adapters in an engine. By the
others front ends go as well, or the server has checked them when it started."""

RANK_OPTIONS = _names(
    """
    decode_context_parallel_size distributed_executor_backend enable_batch_sharded_sampling
    enable_dbo enable_ep_weight_filter enable_eplb eplb_config numa_bind numa_bind_cpus
    numa_bind_nodes pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size
    """
)
"""Options about the ranks of an instance that vLLM checks against each other or against devices."""

_NO_MODEL = re.compile(r"-.*|true|false|\d+", re.IGNORECASE)
"""What no model is called, and may be the second value of an option that takes one."""

UNKNOWN_OPTIONS = "unrecognized arguments: "

KEY_OPTIONS = ("--api-key", "--hf-token")
"""Their values are in no message."""
"""Beginning of argparse's message about unknown options."""


class ServeParser(FlexibleArgumentParser):
    """vLLM's parser with errors of one line, which the usage of hundreds of options would hide.

    Attributes:
        serve_options: the options that an unknown one may have been meant to be.
        takes_model_behind: a word behind the options is the model. argparse, which has its place
            filled, does not know it.
    """

    serve_options: tuple[str, ...] = ()
    takes_model_behind = False

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See ArgumentParser."""
        known, unknown = super().parse_known_args(args, namespace)
        if self.takes_model_behind and len(unknown) == 1 and not _NO_MODEL.fullmatch(unknown[0]):
            known.model_tag = unknown.pop()
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser.

        Raises:
            ConfigurationError: always.
        """
        if message.startswith(UNKNOWN_OPTIONS):
            unknown = message.removeprefix(UNKNOWN_OPTIONS)
            message = UNKNOWN_OPTIONS + self._with_what_was_meant(unknown)
        raise ConfigurationError(message)

    def _with_what_was_meant(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return f"{unknown} (name one model: sterna serve MODEL [options])"
        name = unknown.split()[0].partition("=")[0]
        close = difflib.get_close_matches(name.replace("_", "-"), self.serve_options, n=1)
        if not close:
            return unknown
        return f"{name if close[0] in KEY_OPTIONS else unknown} (did you mean {close[0]}?)"


def make_serve_parser() -> tuple[ServeParser, argparse.ArgumentParser]:
    """Return a parser that reads `serve [MODEL] ...`, and its part for `serve`."""
    parser = ServeParser(prog="sterna")
    commands = parser.add_subparsers(required=True, dest="subparser")
    serve_parser = ServeSubcommand().subparser_init(commands)
    serve_parser.usage = "sterna serve [MODEL] [options]"
    serve_parser.description = (
        "Serve a model on several vLLM instances behind one OpenAI-compatible API. "
        "The options of `vllm serve` work; --help=Sterna lists what is added."
    )
    # vLLM's commands would not find what is added.
    serve_parser.epilog = (serve_parser.epilog or "").replace("vllm serve", "sterna serve")
    serve_parser.set_defaults(
        host="127.0.0.1",
        # Several processes print on one terminal: progress bars and a line a request would hide
        # the rest.
        use_tqdm_on_load=False,
        # A little less than Kubernetes' default grace period.
        shutdown_timeout=25,
        uvicorn_log_level="warning",
    )
    return parser, serve_parser


def parse_serve(
    parser: ServeParser,
    serve_parser: argparse.ArgumentParser,
    arguments: list[str],
    default_model: str,
) -> argparse.Namespace:
    """Return the options in `serve [MODEL] ...`; a file named by --config gives more of them. The
    model may also stand behind options, but for one that takes several values.

    Args:
        default_model: served where neither the command line nor the file names a model.

    Raises:
        ConfigurationError: an option is unknown or its value cannot be read; the message names it.
        SystemExit: help was printed.
    """
    parser.serve_options = tuple(serve_parser._option_string_actions)
    try:
        # vLLM's parser demands a model in the file and ignores `option: false`; its reader of one
        # file does neither.
        options, path = _without_config(arguments[1:])
        in_file = [] if path is None else _read_config(serve_parser, path)
        model, options = _without_model(options)
        model_in_file, in_file = _without_model(in_file)
        # In a container the image's options come before those that the user gives.
        parser.takes_model_behind = model is None
        model = model or model_in_file or default_model
        args: argparse.Namespace = parser.parse_args([arguments[0], model, *in_file, *options])
        if parser.takes_model_behind and args.model_tag == model and model == default_model:
            _check_several_words(serve_parser, options)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise ConfigurationError(str(error)) from error
    return args


def _check_several_words(serve_parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Refuse a last word that an option with several values has taken: it may be the model. So may
    be each but the first after an option with keys, which would give who knows the model's name the
    rights of an operator."""
    places = [place for place, word in enumerate(options) if word.startswith("-")]
    for place, end in itertools.pairwise((*places, len(options))):
        name, has_value, _ = options[place].partition("=")
        num_values = end - 1 - place + bool(has_value)
        option = name.replace("_", "-")
        action = serve_parser._option_string_actions.get(option)
        takes_several = action is not None and action.nargs in ("+", "*")
        is_key, is_last = option in KEY_OPTIONS, end == len(options)
        if takes_several and num_values > 1 and (is_key or is_last):
            taken = "more than one word" if is_key else f"{options[end - 1]} as well"
            raise ConfigurationError(
                f"{name} takes {taken}: name the model before it, or by --model"
            )


def _without_config(options: list[str]) -> tuple[list[str], str | None]:
    """Return the options without --config, and the file that it names."""
    path: str | None = None
    rest: list[str] = []
    remaining = iter(options)
    for option in remaining:
        if option != "--config" and not option.startswith("--config="):
            rest.append(option)
            continue
        if path is not None:
            raise ConfigurationError("--config: give one file, not several")
        path = option.partition("=")[2] if "=" in option else next(remaining, "")
        if not path:
            raise ConfigurationError("--config: name a file")
    return rest, path


def _read_config(serve_parser: argparse.ArgumentParser, path: str) -> list[str]:
    assert isinstance(serve_parser, FlexibleArgumentParser)
    if not Path(path).is_file():
        raise ConfigurationError(f"--config {path}: there is no such file")
    try:
        options: list[str] = serve_parser.load_config_file(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path}: no YAML: {reason}") from error
    except AttributeError as error:
        raise ConfigurationError(f"--config {path}: expected lines like `option: value`") from error
    return options


def _without_model(options: list[str]) -> tuple[str | None, list[str]]:
    """Return the model, given first or by --model, and the other options."""
    if options and not options[0].startswith("-"):
        return options[0], options[1:]
    for index, option in enumerate(options):
        if option == "--model" and index + 1 < len(options):
            return options[index + 1], [*options[:index], *options[index + 2 :]]
        if option.startswith("--model="):
            return option.partition("=")[2], [*options[:index], *options[index + 1 :]]
    return None, options


def validate(args: argparse.Namespace) -> None:
    """Run vLLM's checks of parsed options.

    Raises:
        ConfigurationError: an option cannot work; the message is vLLM's.
    """
    try:
        cli_args.validate_parsed_serve_args(args)
        if not (args.tool_parser_plugin or args.reasoning_parser_plugin):
            # A plugin adds parsers that only the front end knows.
            validate_api_server_args(args)
    except (TypeError, ValueError, VLLMError) as error:
        raise ConfigurationError(str(error)) from error
    except KeyError as error:
        raise ConfigurationError(str(error.args[0])) from error


def client_arguments(args: argparse.Namespace) -> AsyncEngineArgs:
    """Return vLLM's arguments for the engine client of its server.

    Ranks concern only instances. Here vLLM would check them against the devices of this process,
    which needs none.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    for each in fields(AsyncEngineArgs):
        if each.name in RANK_OPTIONS:
            make = each.default_factory
            default = each.default if make is MISSING else make()
            setattr(engine_args, each.name, default)
    if engine_args.speculative_config is not None:
        engine_args.speculative_config = {
            name: value
            for name, value in engine_args.speculative_config.items()
            if name.replace("-", "_") != "draft_tensor_parallel_size"
        }
    return engine_args


def with_options(
    args: argparse.Namespace, options: Sequence[str], *, only: frozenset[str] | None = None
) -> argparse.Namespace:
    """Return the options of `vllm serve` with some overridden, for a rolling restart.

    Args:
        only: the options that may be given; None for no limit.

    Raises:
        ConfigurationError: an option is unknown or may not be given, its value cannot be read, or
            it also concerns the front ends, which are not restarted.
    """
    if not options:
        return args
    if any(each == "--config" or each.startswith("--config=") for each in options):
        # vLLM's parser replaces it by the options in the file, which may be others at each start.
        raise ConfigurationError(
            "--config is not for a rolling restart: give the options themselves"
        )
    _, serve_parser = make_serve_parser()
    # Only given options may be in the result.
    serve_parser._defaults.clear()
    for action in serve_parser._actions:
        action.default = argparse.SUPPRESS
    try:
        given = vars(serve_parser.parse_args(list(options), namespace=argparse.Namespace()))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise ConfigurationError(one_line(error)) from error
    except SystemExit:
        raise ConfigurationError("options of a restart are not for help") from None
    if (model := given.pop("model_tag", None) or given.get("model")) is not None:
        given["model"] = model
    for name in given:
        if name not in ENGINE_OPTIONS:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is not for a rolling restart: it concerns more than "
                "the engines; start another server"
            )
        if only is not None and name not in only:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} may load code or files of the caller's choice: "
                "give the server an API key (--api-key)"
            )
    if model is not None:
        given["model_tag"] = model
    return argparse.Namespace(**{**vars(args), **given})


REFUSALS = (TypeError, ValueError, OSError, RuntimeError)
"""What vLLM raises for options that cannot work together, or on this machine; NotImplementedError
is one of the last."""


_NEEDS_V2 = re.compile("Model Runner V1 does not support|requires Model Runner V2")
"""Of vLLM's refusals, those on account of the model runner that `sterna serve` chooses."""


def vllm_refusal(error: BaseException) -> str:
    """Return the message of vLLM's refusal, with what to do where its build for GPUs finds none, or
    where it needs its V2 model runner."""
    if not current_platform.is_unspecified():
        reason = one_line(error)
        if _NEEDS_V2.search(reason) is None:
            return reason
        return f"{reason} (sterna serve chooses V1: set VLLM_USE_V2_MODEL_RUNNER=1)"
    return (
        "vLLM's build is for GPUs, and it finds none: check the driver (in a container: "
        f"--gpus all), or install sterna[cpu]; sterna doctor says more ({one_line(error)})"
    )


def one_line(error: BaseException) -> str:
    """Return the message of vLLM's error without pydantic's frame."""
    text = str(error)
    errors = getattr(error, "errors", None)
    if callable(errors):
        # Pydantic's own messages do not name the field.
        text = "; ".join(": ".join(map(str, (*each["loc"], each["msg"]))) for each in errors())
    return " ".join(text.split()).removeprefix("Value error, ")


def loads_adapters_at_run_time() -> bool:
    """Whether vLLM's server loads further LoRA adapters on request while it runs."""
    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def stores_responses() -> bool:
    """Whether vLLM's server keeps responses, which clients ask for by their ids."""
    return bool(envs.VLLM_ENABLE_RESPONSES_API_STORE)


def bound_event_endpoints(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the endpoints of KV events that each instance would bind, of which one can: those with
    a port or a path. vLLM connects to the address of a subscriber, and port 0 is any that is free.
    """
    events = args.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher == "null":
        return ()
    is_bound = any(mark in events.endpoint for mark in ("*", "::", "ipc://"))
    bound = (events.endpoint if is_bound else None, events.replay_endpoint)
    return tuple(each for each in bound if each and each != "tcp://*:0")


def leaves_memory_to_vllm(args: argparse.Namespace) -> bool:
    """Whether no option sets the memory of an instance."""
    default = EngineArgs.gpu_memory_utilization
    return args.kv_cache_memory_bytes is None and args.gpu_memory_utilization == default
