"""Options of a front end's client: those of the instances without their ranks, by vLLM's parser."""

from pathlib import Path

import pytest

from tests.models import tiny_random_llama

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "options",
    [
        ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"),
        ("--prefill-context-parallel-size", "2"),
        ("--pipeline-parallel-size", "2"),
        ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
        ("--tensor-parallel-size", "2", "--speculative-config", "DRAFTS"),
        (
            *("--tensor-parallel-size", "2", "--speculative-config.num-speculative-tokens", "2"),
            *("--speculative-config.model", "MODEL"),
            *("--speculative-config.draft-tensor-parallel-size", "2"),
        ),
    ],
    ids=" ".join,
)
def test_a_client_needs_no_devices_for_the_ranks_of_an_instance(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    from sterna.engine.vllm.arguments import client_arguments, make_serve_parser, parse_serve
    from sterna.engine.vllm.hosted_core import world_size

    model = str(tiny_random_llama(tmp_path / "model", seed=1))
    drafts = f'{{"model": "{model}", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}}'
    given = [{"DRAFTS": drafts, "MODEL": model}.get(each, each) for each in options]
    arguments = ["serve", model, "--dtype", "float32", *given]
    args = parse_serve(*make_serve_parser(), arguments, "no default")
    args.model = args.model_tag
    assert world_size(args) == 2

    config = client_arguments(args).create_engine_config()

    assert config.parallel_config.world_size == 1
    if config.speculative_config is not None:
        assert config.speculative_config.draft_tensor_parallel_size == 1
