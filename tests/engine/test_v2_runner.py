"""Moves of requests between engines with vLLM's V2 model runner.

Scheduler, messages to the worker and the worker's rows are vLLM's; kernels and model are played
(`tests/engine/v2_cores.py`). V2 has never run on a GPU with Sterna.
"""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.outputs import ModelRunnerOutput

from sterna.engine.drains import Left
from sterna.engine.vllm.request_state import RequestState
from sterna.engine.vllm.scheduler import MigratingAsyncScheduler
from sterna.engine.vllm.support import immovable_engine_features
from sterna.migration.messages import Adopt, Adopted, Drain, Drained, Mode, Reason
from sterna.types import MigrationId, RequestId
from tests.engine.test_vllm_engine import run_with_engine
from tests.engine.test_vllm_histories import wire_request
from tests.engine.v2_cores import MAX_NUM_SEQS, NUM_BLOCKS, v2_cores

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MIGRATION, NAME = MigrationId("m"), RequestId("moves")
NUM_OUTPUTS = 60
CUTS = (1, 7, 30)
RANDOM: dict[str, Any] = {"temperature": 0.9}
SEEDED = {**RANDOM, "seed": 11}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with v2_cores(tmp_path_factory.mktemp("models") / "tiny", 2) as made:
        yield made


@pytest.fixture
def cores(both: list[Any]) -> Iterator[list[Any]]:
    """A source and a destination without requests, which are empty again in the end."""
    for core in both:
        core.model_executor.outputs.clear()
        core.scheduler.kv_cache_manager.reset_prefix_cache()
        runner_of(core).pages[:] = 7
        runner_of(core).sampler.use_flashinfer = False
    yield both
    for core in both:
        finish(core)
        assert is_empty(core)


# ----------------------------------------------------------------------------------- messages


def test_an_adopted_request_is_announced_as_one_that_vllm_resumes(cores: list[Any]) -> None:
    """With all tokens, all blocks of each group and the number of tokens in them. Of those that the
    worker knows, only news are told."""
    source, destination = cores
    add(destination, "neighbour", [5] * 20)
    request = add(source, NAME, [9] * 100)
    run(source, request, 7)
    step(destination)
    move(source, destination)
    adopted = destination.scheduler.requests[NAME]
    tokens = list(request.all_token_ids)
    step(destination)
    output = destination.model_executor.outputs[-1]
    (announced,) = output.scheduled_new_reqs
    blocks = tuple(destination.scheduler.groups.block_ids(NAME))
    assert [len(each) for each in blocks] == [7, 7]
    # Those that the window has left behind.
    assert [each.count(0) for each in blocks] == [0, 2]
    assert announced == NewRequestData(
        req_id=NAME,
        prompt_token_ids=[9] * 100,
        prefill_token_ids=announced.prefill_token_ids,
        mm_features=[],
        sampling_params=adopted.sampling_params,
        pooling_params=None,
        block_ids=blocks,
        num_computed_tokens=106,
        lora_request=None,
    )
    assert announced.prefill_token_ids[:107] == tokens
    known = output.scheduled_cached_reqs
    assert known.req_ids == ["neighbour"]
    columns = (known.new_block_ids, known.num_computed_tokens, known.num_output_tokens)
    assert [len(column) for column in columns] == [1, 1, 1]
    assert known.num_computed_tokens == [20]
    assert output.num_scheduled_tokens == {"neighbour": 1, NAME: 1}
    step(destination)
    output = destination.model_executor.outputs[-1]
    assert not output.scheduled_new_reqs
    assert set(output.scheduled_cached_reqs.req_ids) == {"neighbour", NAME}
    assert runner_of(destination).sampler.sampling_states.temperature.np[row(destination)] == 0


def test_a_request_without_kv_is_announced_by_vllm_itself(cores: list[Any]) -> None:
    source, destination = cores
    expected = unmoved(source, [9] * 100, {})
    request = add(source, NAME, [9] * 100)
    run(source, request, 7)
    move(source, destination, mode=Mode.RECOMPUTE)
    assert not destination.scheduler._unannounced
    adopted = destination.scheduler.requests[NAME]
    run(destination, adopted, NUM_OUTPUTS - 7)
    first = destination.model_executor.outputs[0]
    (announced,) = first.scheduled_new_reqs
    assert len(announced.prefill_token_ids) >= 107
    assert announced.num_computed_tokens == 0
    assert list(adopted.output_token_ids) == expected


def test_a_request_is_announced_with_its_adapter(cores: list[Any]) -> None:
    source, destination = cores
    adapter = LoRARequest("a", 3, "/nowhere")
    run(source, add(source, NAME, [9] * 20, adapter=adapter), 3)
    move(source, destination)
    step(destination)
    (announced,) = destination.model_executor.outputs[-1].scheduled_new_reqs
    assert announced.lora_request == adapter
    assert runner_of(destination).lora_state.lora_ids[row(destination)] == 3


# -------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("settings", [{}, SEEDED, RANDOM], ids=["greedy", "seeded", "unseeded"])
@pytest.mark.parametrize("prompt_tokens", [20, 150])
def test_a_request_goes_on_as_if_it_had_not_moved(
    cores: list[Any], prompt_tokens: int, settings: dict[str, Any]
) -> None:
    source, destination = cores
    prompt = [3 + (7 * token) % 500 for token in range(prompt_tokens)]
    for cut in CUTS:
        outputs = run(source, add(source, NAME, prompt, settings), cut)
        # An unseeded request gives what one with the worker's seed would give.
        same = {**settings, "seed": seed_of(source)} if settings is RANDOM else settings
        add(destination, "neighbour", [5] * 30)
        step(destination)
        move(source, destination)
        adopted = destination.scheduler.requests[NAME]
        outputs += run(destination, adopted, NUM_OUTPUTS - cut)
        finish(destination)
        assert outputs == unmoved(source, prompt, same), cut


def test_a_request_moves_several_times(cores: list[Any]) -> None:
    """An unseeded one keeps its seed, also where it leaves before its first step."""
    source, destination = cores
    request = add(source, NAME, [9] * 90, RANDOM)
    outputs = run(source, request, 10)
    same = {**RANDOM, "seed": seed_of(source)}
    move(source, destination)
    move(destination, source)
    step(destination)
    outputs += run(source, source.scheduler.requests[NAME], 10)
    move(source, destination)
    outputs += run(destination, destination.scheduler.requests[NAME], NUM_OUTPUTS - 20)
    assert outputs == unmoved(source, [9] * 90, same)


@pytest.mark.parametrize("group", [0, 1])
def test_pages_of_every_group_matter(cores: list[Any], group: int) -> None:
    """Otherwise the tests above would show nothing."""
    source, destination = cores
    expected = unmoved(source, [9] * 90, {})
    request = add(source, NAME, [9] * 90)
    outputs = run(source, request, 10)
    move(source, destination, left_out=group)
    outputs += run(destination, destination.scheduler.requests[NAME], NUM_OUTPUTS - 10)
    assert outputs != expected


def test_a_seed_that_is_not_carried_changes_the_tokens(cores: list[Any]) -> None:
    source, destination = cores
    request = add(source, NAME, [9] * 90, RANDOM)
    outputs = run(source, request, 10)
    same = {**RANDOM, "seed": seed_of(source)}
    # As with FlashInfer's sampler, which ignores it.
    runner_of(source).sampler.use_flashinfer = True
    state = move(source, destination)
    assert state.seed is None
    assert destination.scheduler.requests[NAME].sampling_params.seed is None
    outputs += run(destination, destination.scheduler.requests[NAME], NUM_OUTPUTS - 10)
    assert outputs != unmoved(source, [9] * 90, same)


@pytest.mark.parametrize(
    ("settings", "carried"), [({}, None), ({"seed": 4}, None), (SEEDED, 11)], ids=str
)
def test_seeds_are_carried_where_draws_depend_on_them(
    cores: list[Any], settings: dict[str, Any], carried: int | None
) -> None:
    source, destination = cores
    run(source, add(source, NAME, [9] * 20, settings), 3)
    state = move(source, destination)
    assert (state.seed, state.generator_state) == (carried, None)


def test_a_carried_seed_is_not_written_into_what_the_front_end_sent(cores: list[Any]) -> None:
    source, _ = cores
    sent = wire_request(NAME, RANDOM)
    request, _ = source.preprocess_add_request(sent)
    from sterna.engine.vllm.request_state import restore_history

    restore_history(source, request, RequestState([5, 6], 0, 0, seed=77))
    assert request.sampling_params.seed == 77
    assert sent.sampling_params.seed is None


# ------------------------------------------------------------------- drains, ends, preemptions


def test_a_request_that_is_resumed_on_its_source_has_kept_its_row(cores: list[Any]) -> None:
    """It has missed steps. To the worker it is one that was not in their batches."""
    source, _ = cores
    expected = unmoved(source, [9] * 90, SEEDED)
    add(source, "neighbour", [5] * 30, {"max_tokens": 90})
    request = add(source, NAME, [9] * 90, SEEDED)
    outputs = run(source, request, 10)
    held = row(source)
    assert isinstance(source.scheduler.begin_drain(drain(source)), Left)
    for _ in range(5):
        step(source)
    source.scheduler.resume(NAME)
    source.model_executor.outputs.clear()
    outputs += run(source, request, NUM_OUTPUTS - 10)
    first = source.model_executor.outputs[0]
    assert not first.scheduled_new_reqs
    assert NAME in first.scheduled_cached_reqs.req_ids
    assert row_of(source, NAME) in (held, None)
    assert outputs == expected


def test_drained_and_adopted_requests_never_need_more_rows_than_there_are(
    cores: list[Any],
) -> None:
    """vLLM's worker has a row for each of `max_num_seqs` requests, and asserts that one is free."""
    source, destination = cores
    requests = [add(source, f"r{n}", [9 + n] * 40) for n in range(MAX_NUM_SEQS)]
    for request in requests:
        run(source, request, 2)
    add(source, "waits", [5] * 20)
    assert isinstance(source.scheduler.begin_drain(drain(source, "r0")), Left)
    step(source)
    assert len(runner_of(source).req_states.req_id_to_index) == MAX_NUM_SEQS
    assert "waits" not in [each.request_id for each in source.scheduler.running]
    arrive(source, destination, leave(source, "r0"), "r0")
    step(source)
    assert "waits" in [each.request_id for each in source.scheduler.running]
    assert len(runner_of(source).req_states.req_id_to_index) == MAX_NUM_SEQS


@pytest.mark.parametrize("mode", [Mode.LIVE, Mode.RECOMPUTE])
def test_a_request_that_comes_back_before_the_worker_has_got_its_end(
    cores: list[Any], mode: Mode
) -> None:
    """Within one step of this engine. The old row is freed first; were it not, it would be lost
    while the request queues, and the worker would end for want of rows."""
    source, destination = cores
    expected = unmoved(source, [9] * 90, SEEDED)
    request = add(source, NAME, [9] * 90, SEEDED)
    outputs = run(source, request, 10)
    move(source, destination)
    outputs += run(destination, destination.scheduler.requests[NAME], 10)
    move(destination, source, mode=mode)
    assert NAME in source.scheduler.finished_req_ids
    source.model_executor.outputs.clear()
    outputs += run(source, source.scheduler.requests[NAME], 1)
    first = source.model_executor.outputs[0]
    assert first.finished_req_ids == {NAME}
    assert [each.req_id for each in first.scheduled_new_reqs] == [NAME]
    states = runner_of(source).req_states
    assert len(states.req_id_to_index) + len(states.free_indices) == MAX_NUM_SEQS
    outputs += run(source, source.scheduler.requests[NAME], NUM_OUTPUTS - 21)
    assert outputs == expected


def test_a_request_that_is_preempted_before_its_first_step_is_announced_once(
    cores: list[Any],
) -> None:
    source, destination = cores
    expected = unmoved(source, [9] * 90, SEEDED)
    request = add(source, NAME, [9] * 90, SEEDED)
    outputs = run(source, request, 10)
    move(source, destination)
    scheduler = destination.scheduler
    adopted = scheduler.requests[NAME]
    scheduler.running.remove(adopted)
    scheduler._preempt_request(adopted, 0.0)
    outputs += run(destination, adopted, NUM_OUTPUTS - 10)
    news = [
        each.req_id for out in destination.model_executor.outputs for each in out.scheduled_new_reqs
    ]
    assert news == [NAME]
    assert not scheduler._unannounced
    assert outputs == expected


def test_a_request_that_ends_before_its_first_step_leaves_nothing(cores: list[Any]) -> None:
    source, destination = cores
    run(source, add(source, NAME, [9] * 90), 10)
    move(source, destination)
    destination.abort_requests([NAME])
    run(destination, add(destination, "next", [5] * 20), 3)
    assert not destination.scheduler._unannounced
    assert NAME not in runner_of(destination).req_states.req_id_to_index


def test_with_asynchronous_scheduling_a_request_is_announced_in_its_first_step_only(
    cores: list[Any],
) -> None:
    """The second step is scheduled before the first one has ended."""
    source, destination = cores
    request = add(source, NAME, [9] * 40)
    run(source, request, 3)
    config = copy.deepcopy(destination.vllm_config)
    config.scheduler_config.async_scheduling = True
    scheduler = MigratingAsyncScheduler(
        vllm_config=config,
        kv_cache_config=destination.scheduler.kv_cache_config,
        structured_output_manager=destination.structured_output_manager,
        block_size=destination.scheduler.block_size,
        hash_block_size=destination.scheduler.hash_block_size,
    )
    core = SimpleNamespace(
        scheduler=scheduler,
        preprocess_add_request=destination.preprocess_add_request,
        model_executor=destination.model_executor,
        structured_output_manager=destination.structured_output_manager,
    )
    move(source, core)
    first, second = scheduler.schedule(), scheduler.schedule()
    (announced,) = first.scheduled_new_reqs
    assert (announced.req_id, announced.num_computed_tokens) == (NAME, 42)
    assert not first.scheduled_cached_reqs.req_ids
    assert not second.scheduled_new_reqs
    assert second.scheduled_cached_reqs.req_ids == [NAME]
    assert second.scheduled_cached_reqs.num_computed_tokens == [43]
    for output, token in ((first, 21), (second, 22)):
        scheduler.update_from_output(
            output,
            ModelRunnerOutput([NAME], {NAME: 0}, sampled_token_ids=[[token]]),
        )
    assert list(scheduler.requests[NAME].output_token_ids)[-2:] == [21, 22]


# --------------------------------------------------------------------------- what does not move


def test_v2_moves_requests_but_not_with_drafts(cores: list[Any]) -> None:
    source, _ = cores
    cache = source.scheduler.kv_cache_config
    assert immovable_engine_features(source.vllm_config, cache) == ()
    config = copy.copy(source.vllm_config)
    speculation = SimpleNamespace(method="ngram", use_multi_module_mtp=lambda: False)
    config.speculative_config = speculation  # type: ignore[assignment]
    assert "drafts on vLLM's V2 model runner" in immovable_engine_features(config, cache)


# ------------------------------------------------------------------------------------- helpers


def add(
    core: Any,
    name: str,
    prompt: list[int],
    settings: dict[str, Any] | None = None,
    adapter: Any = None,
) -> Any:
    sent = wire_request(name, {"max_tokens": NUM_OUTPUTS, **(settings or {})}, adapter)
    sent.prompt_token_ids = prompt
    request, wave = core.preprocess_add_request(sent)
    core.add_request(request, wave)
    return request


def step(core: Any) -> None:
    _, is_executed = core.step_fn()
    core.post_step(is_executed)


def run(core: Any, request: Any, num_outputs: int) -> list[int]:
    """Step until the request has this number of further outputs, and return them."""
    begin = request.num_output_tokens
    for _ in range(1000):
        if request.num_output_tokens - begin >= num_outputs:
            break
        step(core)
    return list(request.output_token_ids)[begin:]


def finish(core: Any) -> None:
    for _ in range(1000):
        if not core.scheduler.has_requests():
            return
        step(core)


def unmoved(core: Any, prompt: list[int], settings: dict[str, Any]) -> list[int]:
    request = add(core, "alone", prompt, settings)
    outputs = run(core, request, NUM_OUTPUTS)
    assert len(set(outputs)) > NUM_OUTPUTS // 2
    step(core)
    return outputs


def drain(core: Any, name: str = NAME, mode: Mode = Mode.LIVE) -> Drain:
    num_units = core.scheduler.progress(RequestId(name)).num_blocks + 1
    return Drain(MIGRATION, RequestId(name), mode, 0, 0, num_units)


def leave(core: Any, name: str, mode: Mode = Mode.LIVE) -> RequestState:
    """The state of a request, which is drained if it is not yet."""
    effect = drain(core, name, mode)
    if name not in core.scheduler._drained:
        assert isinstance(core.scheduler.begin_drain(effect), Left)
    assert core.scheduler.is_drained(name)

    async def export(engine: Any, _: Any) -> RequestState:
        drained = engine._export(core, effect)
        assert isinstance(drained, Drained)
        return RequestState.decode(drained.state)

    return run_with_engine(core, export)


def arrive(
    source: Any, destination: Any, state: RequestState, name: str, left_out: int | None = None
) -> None:
    """Copy the pages, adopt the request and release it on its source."""
    here, there = source.scheduler, destination.scheduler
    leaving = here.requests[name]
    if state.num_valid_tokens:
        num_valid = state.num_valid_tokens
        num_units = here.groups.num_units(num_valid) + 1
        columns = here.groups.stage_columns(0, num_units, num_valid, is_last=True)
        reserved = there.reserve(MIGRATION, columns, needs_slot=True)
        assert not isinstance(reserved, Reason)
        sent = here.groups.blocks_of(here.groups.block_ids(name), columns, num_valid)
        for group, (ours, theirs) in enumerate(zip(sent, reserved, strict=True)):
            if group != left_out:
                pages = runner_of(source).pages[ours]
                runner_of(destination).pages[theirs[: len(ours)]] = pages
    case = {"max_tokens": leaving.max_tokens, "temperature": leaving.sampling_params.temperature}
    message = wire_request(name, case, leaving.lora_request)
    message.prompt_token_ids = list(leaving.prompt_token_ids)
    request, _ = destination.preprocess_add_request(message)

    async def adopt(engine: Any, _: Any) -> None:
        effect = Adopt(MIGRATION, RequestId(name), 0, state.encode())
        assert engine._adopt(destination, effect, request, message) == Adopted()

    run_with_engine(destination, adopt)
    here.release(name)


def move(
    source: Any,
    destination: Any,
    *,
    mode: Mode = Mode.LIVE,
    left_out: int | None = None,
) -> RequestState:
    state = leave(source, NAME, mode)
    arrive(source, destination, state, NAME, left_out)
    return state


def runner_of(core: Any) -> Any:
    return core.model_executor.worker.model_runner


def row_of(core: Any, name: str) -> int | None:
    found: int | None = runner_of(core).req_states.req_id_to_index.get(name)
    return found


def row(core: Any) -> int:
    found = row_of(core, NAME)
    assert found is not None
    return found


def seed_of(core: Any) -> int:
    return int(runner_of(core).sampler.sampling_states.seeds.np[row(core)])


def is_empty(core: Any) -> bool:
    pool = core.scheduler.kv_cache_manager.block_pool
    states = runner_of(core).req_states
    return (
        pool.get_num_free_blocks() == NUM_BLOCKS - 1
        and not core.scheduler.requests
        and len(states.free_indices) == MAX_NUM_SEQS
    )
