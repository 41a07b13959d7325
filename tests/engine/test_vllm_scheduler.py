"""vLLM's scheduler as Sterna's sees it: views of prompts in chunks, and reservations."""

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.messages.actors import DispatchRequest
from sterna.migration.messages import Reason
from sterna.priority_classes import PriorityClass, PriorityClasses
from sterna.types import FrontendId, Immovable, InstanceId, MigrationId, Priority, RequestId
from tests.engine.vllm_cores import tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_SIZE = 32
NUM_BLOCKS = 10
MAX_NUM_BATCHED_TOKENS = 64


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM engine core of a tiny random model, stepped by hand."""
    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS + 1,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=4,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    ) as core:
        yield core


def with_scheduler(
    core: Any,
    *,
    max_num_seqs: int = 4,
    watermark: float = 0.0,
    policy: str = "fcfs",
    prefix_caching: bool = False,
    log_stats: bool = False,
    end_of_thinking: Sequence[int] = (),
    has_drafts: bool = False,
) -> Any:
    """The core with a scheduler of Sterna's that has seen no request."""
    from vllm.config import ReasoningConfig, SpeculativeConfig

    from sterna.engine.vllm.scheduler import MigratingScheduler

    config = copy.deepcopy(core.vllm_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.watermark = watermark
    config.scheduler_config.policy = policy
    config.cache_config.enable_prefix_caching = prefix_caching
    if end_of_thinking:
        config.reasoning_config = ReasoningConfig()
        config.reasoning_config._reasoning_end_token_ids = list(end_of_thinking)
    if has_drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    core.scheduler = MigratingScheduler(
        vllm_config=config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.hash_block_size,
        log_stats=log_stats,
    )
    return core


def wire_request(
    name: str,
    prompt_tokens: int,
    *,
    output_tokens: int = 8,
    arrival_s: float = 0.0,
    vllm_priority: int = 0,
    thinking_budget: int | None = None,
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[100] * prompt_tokens,
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            thinking_token_budget=thinking_budget,
        ),
        pooling_params=None,
        arrival_time=arrival_s,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=vllm_priority,
    )


def add(core: Any, name: str, prompt_tokens: int, **settings: Any) -> None:
    core.add_request(*core.preprocess_add_request(wire_request(name, prompt_tokens, **settings)))


def step(core: Any) -> None:
    _, is_executed = core.step_fn()
    core.post_step(is_executed)


def finish(core: Any) -> None:
    """Let the worker hear of all ends."""
    for _ in range(100):
        if not core.scheduler.has_requests():
            return
        step(core)
    raise AssertionError("requests are left")


def test_a_prompt_in_chunks_is_shown_with_the_demand_of_all_of_it(vllm_core: Any) -> None:
    """By hand: with 64 tokens a step, a prompt of 150 takes 5 blocks in the end and holds 2, 4
    and 5 of them after its three steps, the last of which brings its first token."""
    core = with_scheduler(vllm_core)
    add(core, "a", 150)
    held = []
    for _ in range(4):
        step(core)
        (view,) = core.scheduler.view(InstanceId("i0"), False).running
        held.append((view.physical_usage_tokens, view.demand_tokens, view.immovable))
    assert held == [
        (64, 160, Immovable.PREFILLING),
        (128, 160, Immovable.PREFILLING),
        (160, 0, None),
        (160, 0, None),
    ]
    finish(core)


def test_what_is_still_to_be_computed_is_shown(vllm_core: Any) -> None:
    """By hand: prompts of equal tokens, of which a step computes 64. Behind the first one, four
    blocks of the second one's 150 tokens are cached, and one of the third one's 40."""
    core = with_scheduler(vllm_core, prefix_caching=True)

    def left() -> dict[str, int]:
        view = core.scheduler.view(InstanceId("i0"), False)
        return {each.request_id: each.uncomputed_tokens for each in (*view.running, *view.queuing)}

    add(core, "a", 150)
    assert left() == {"a": 150}
    step(core)
    add(core, "b", 150)
    assert left() == {"a": 86, "b": 86}
    step(core)
    assert left() == {"a": 22, "b": 86}
    add(core, "c", 40)
    assert left() == {"a": 22, "b": 86, "c": 8}
    finish(core)
    add(core, "d", 150)
    assert left() == {"d": 22}
    finish(core)


def test_a_preempted_request_is_shown_with_all_that_it_computes_again(vllm_core: Any) -> None:
    """By hand: its 43 tokens fit into one step, in which they are still to be computed."""
    core = with_scheduler(vllm_core)
    shown = []
    core.scheduler.on_scheduled = (
        lambda _: shown.extend(core.scheduler.view(InstanceId("i0"), False).running),
    )
    add(core, "a", 40)
    for _ in range(3):
        step(core)
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(2):
        step(core)
    assert [(each.num_tokens, each.uncomputed_tokens, each.immovable) for each in shown] == [
        (40, 40, Immovable.PREFILLING),
        (41, 0, None),
        (42, 0, None),
        (43, 43, Immovable.PREFILLING),
        (44, 0, None),
    ]
    finish(core)


def test_what_the_prefix_cache_gets_and_loses_is_recorded(vllm_core: Any) -> None:
    """The scheduler of the cluster finds by it what this one finds; an emptied cache is told as a
    whole."""
    from sterna.instance.cache_contents import CacheContents
    from sterna.scheduler.prefix_index import PrefixIndex

    core = with_scheduler(vllm_core, prefix_caching=True)
    scheduler = core.scheduler
    scheduler.report_cache()
    contents, index = CacheContents(InstanceId("i0"), scheduler.cache_reports.layout), PrefixIndex()

    def found() -> int:
        if (changes := scheduler.cache_reports.take_changes()) is not None:
            contents.on_changes(changes)
        if (report := contents.next_report()) is not None:
            index.on_report(report)
        asked = ask_of(core, wire_request("other", 150))
        return index.cached_tokens(asked).get(InstanceId("i0"), 0)

    assert found() == 0
    add(core, "a", 150)
    step(core)
    assert found() == 64
    finish(core)
    assert found() == 128
    assert scheduler.reset_prefix_cache()
    assert found() == 0
    add(core, "b", 40)
    finish(core)
    assert found() == 32


def test_an_engine_that_copies_no_prefix_says_so(vllm_core: Any) -> None:
    def moves(core: Any) -> bool:
        core.scheduler.report_cache()
        return bool(core.scheduler.cache_reports.layout.moves)

    core = with_scheduler(vllm_core, prefix_caching=True)
    assert moves(core)
    core.scheduler.connector = SimpleNamespace()
    assert not moves(core)
    core.scheduler.connector = None
    core.scheduler.immovable_features = ("an option",)
    assert not moves(core)
    core.scheduler.immovable_features = ()
    core.scheduler.prefixes.can_move = False
    assert not moves(core)


def ask_of(core: Any, request: Any) -> DispatchRequest:
    """What a front end asks for this request."""
    from sterna.engine.interface import PromptHashing
    from sterna.frontend.vllm_server.prompt_hashes import prompt_hashes

    algorithm = core.vllm_config.cache_config.prefix_caching_hash_algo
    hashing = PromptHashing(algorithm, core.scheduler.cache_reports.layout.hash_tokens)
    num_tokens = len(request.prompt_token_ids)
    return DispatchRequest(
        FrontendId(0),
        RequestId(request.request_id),
        num_tokens,
        0.0,
        Priority(0),
        Priority(0),
        prompt_tokens=num_tokens,
        block_hashes=prompt_hashes(hashing)(request),
    )


def test_a_preempted_request_is_shown_with_the_demand_of_its_output_too(vllm_core: Any) -> None:
    """By hand: 96 tokens of prompt and 2 of output are 4 blocks; the first chunk holds 2."""
    core = with_scheduler(vllm_core)
    add(core, "a", 96)
    for _ in range(3):
        step(core)
    request = core.scheduler.requests["a"]
    assert request.num_output_tokens == 2
    core.scheduler.running.remove(request)
    core.scheduler._preempt_request(request, 0.0)
    step(core)
    (view,) = core.scheduler.view(InstanceId("i0"), False).running
    assert (view.physical_usage_tokens, view.demand_tokens) == (64, 128)
    assert view.immovable is Immovable.PREFILLING
    step(core)
    (view,) = core.scheduler.view(InstanceId("i0"), False).running
    assert (view.physical_usage_tokens, view.demand_tokens) == (128, 0)
    finish(core)


def test_the_prefix_cache_is_not_emptied_while_a_move_holds_blocks(vllm_core: Any) -> None:
    """And nothing is preempted for it: vLLM would preempt all, and then fail."""
    core = with_scheduler(vllm_core, prefix_caching=True)
    scheduler, migration_id = core.scheduler, MigrationId("m")
    add(core, "a", 40)
    step(core)
    assert scheduler.reserve(migration_id, (range(2),), needs_slot=False) != Reason.NO_MEMORY
    assert not scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [each.request_id for each in scheduler.running] == ["a"]
    scheduler.free_reservation(migration_id)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.running
    finish(core)


def test_a_request_that_will_queue_is_reserved_neither_slot_nor_memory(vllm_core: Any) -> None:
    """By hand: a, with the only slot, leaves 5 of 10 blocks free, as many as the watermark."""
    core = with_scheduler(vllm_core, max_num_seqs=1, watermark=0.5)
    add(core, "a", 160)
    step(core)
    step(core)
    step(core)
    scheduler, migration_id = core.scheduler, MigrationId("m")
    nothing, one = (range(0),), (range(1),)
    assert scheduler.reserve(migration_id, one, needs_slot=True) is Reason.NO_MEMORY
    assert scheduler.reserve(migration_id, nothing, needs_slot=True) == [[]]
    scheduler.free_reservation(migration_id)
    finish(core)
    assert scheduler.reserve(migration_id, nothing, needs_slot=True) == [[]]
    add(core, "b", 16)
    step(core)
    assert [each.request_id for each in scheduler.running] == ["b"]
    scheduler.free_reservation(migration_id)
    finish(core)


def adopt(core: Any, request: Any, output_token_ids: list[int], num_preemptions: int = 0) -> None:
    """Take in a queuing request, which travels as its front end sent it."""
    from sterna.engine.vllm.payload import decode_request, encode_request
    from sterna.engine.vllm.request_state import RequestState, restore_history

    adopted, _ = core.preprocess_add_request(decode_request(encode_request(request)))
    restore_history(core, adopted, RequestState(output_token_ids, 0, num_preemptions))
    core.scheduler.adopt_queuing(MigrationId(f"m-{request.request_id}"), adopted)


def test_a_request_that_moves_while_it_queues_keeps_its_place_by_arrival(vllm_core: Any) -> None:
    """Section 4.4.3: "Within the same priority, it adopts a simple first-come-first-serve order.
    On each instance, requests are scheduled in the same order." """
    core = with_scheduler(vllm_core, max_num_seqs=1, policy="priority")
    add(core, "runs", 64)
    step(core)
    add(core, "late", 32, arrival_s=5.0)
    add(core, "first", 32, arrival_s=1.0)
    adopt(core, wire_request("second", 32, arrival_s=2.0), [])
    adopt(core, wire_request("third", 32, arrival_s=3.0), [100, 100])
    adopt(core, wire_request("urgent", 32, arrival_s=9.0, vllm_priority=-1), [])
    queuing = core.scheduler.view(InstanceId("i0"), False).queuing
    assert [view.request_id for view in queuing] == ["urgent", "first", "second", "third", "late"]
    assert [view.arrival_s for view in queuing] == [9.0, 1.0, 2.0, 3.0, 5.0]
    assert [int(view.scheduling_priority) for view in queuing] == [1, 0, 0, 0, 0]
    assert [view.num_earlier_tokens for view in queuing] == [0, 0, 0, 2, 0]
    # The worker of this test was not told of its outputs.
    core.abort_requests(["third"])
    finish(core)


def test_first_come_first_served_holds_for_requests_from_elsewhere(vllm_core: Any) -> None:
    """vLLM's queue without priorities appends what comes, and puts preempted ones in front."""
    core = with_scheduler(vllm_core, max_num_seqs=1, policy="fcfs")
    add(core, "runs", 64)
    step(core)
    add(core, "first", 32, arrival_s=1.0)
    add(core, "late", 32, arrival_s=5.0)
    adopt(core, wire_request("second", 32, arrival_s=2.0), [])
    adopt(core, wire_request("goes on", 32, arrival_s=3.0), [100, 100])
    adopt(core, wire_request("goes on later", 32, arrival_s=4.0), [100])
    adopt(core, wire_request("last", 32, arrival_s=6.0), [])
    queuing = core.scheduler.view(InstanceId("i0"), False).queuing
    expected = ["goes on", "goes on later", "first", "second", "late", "last"]
    assert [view.request_id for view in queuing] == expected
    # The worker of this test was not told of their outputs.
    core.abort_requests(["goes on", "goes on later"])
    finish(core)


@pytest.mark.parametrize(("output_token_ids", "expected"), [([], (0, 96)), ([100], (2, None))])
def test_preemptions_before_the_first_token_do_not_count_where_a_request_comes(
    vllm_core: Any, output_token_ids: list[int], expected: tuple[int, int | None]
) -> None:
    """vLLM counts the prompt of a request that was never preempted, and the client of this one has
    got no count yet. With outputs it has."""
    core = with_scheduler(vllm_core)
    adopt(core, wire_request("a", 96), output_token_ids, num_preemptions=2)
    core.scheduler.schedule()
    (request,) = core.scheduler.running
    stats = request.prefill_stats
    counted = None if stats is None else stats.num_prompt_tokens
    assert (request.num_preemptions, counted) == expected


def test_a_kv_connector_is_told_of_a_request_that_comes_with_a_history(vllm_core: Any) -> None:
    """As of any other: vLLM's own offloading looks its state up at the first step."""

    class Connector:
        def __init__(self) -> None:
            self.told: list[str] = []

        def on_new_request(self, request: Any) -> None:
            self.told.append(request.request_id)

    scheduler = with_scheduler(vllm_core).scheduler
    scheduler.connector = connector = Connector()
    request, _ = vllm_core.preprocess_add_request(wire_request("again", 32))
    request.append_output_token_ids([100, 100])
    scheduler.add_with_history(request)
    assert connector.told == ["again"]
    scheduler.connector = None
    vllm_core.abort_requests(["again"])
    finish(vllm_core)


@pytest.mark.parametrize(
    ("end", "has_drafts", "is_movable"),
    [([7], True, True), ([5, 6, 7], False, True), ([5, 6, 7], True, False)],
)
def test_a_request_whose_thinking_ends_by_several_tokens_stays_where_there_are_drafts(
    vllm_core: Any, end: Sequence[int], has_drafts: bool, is_movable: bool
) -> None:
    """Another worker would say them again, in part or in the answer."""
    core = with_scheduler(vllm_core, end_of_thinking=end, has_drafts=has_drafts)
    add(core, "thinks", 20, thinking_budget=4)
    add(core, "answers", 20)
    step(core)
    views = {each.request_id: each for each in core.scheduler.view(InstanceId("i0"), False).running}
    thinks = views[RequestId("thinks")]
    assert (thinks.immovable is None) is is_movable
    if not is_movable:
        assert thinks.immovable is Immovable.UNSUPPORTED_REQUEST_FEATURE
        assert thinks.unsupported == "a thinking budget that ends by several tokens, beside drafts"
    assert views[RequestId("answers")].immovable is None
    finish(core)


def test_views_have_both_priorities_of_a_requests_class(vllm_core: Any) -> None:
    core = with_scheduler(vllm_core, policy="priority")
    core.scheduler.classes = PriorityClasses(
        (
            PriorityClass("normal", Priority(0), Priority(0)),
            PriorityClass("gold", Priority(3), Priority(2)),
            PriorityClass("batch", Priority(-1), Priority(0)),
        )
    )
    for name, vllm_priority in (("a", -3), ("b", 0), ("c", 1)):
        add(core, name, 32, vllm_priority=vllm_priority)
    step(core)
    view = core.scheduler.view(InstanceId("i0"), False)
    # Two prompts fill the step; c queues.
    assert {
        each.request_id: (each.scheduling_priority, each.execution_priority)
        for each in (*view.running, *view.queuing)
    } == {"a": (3, 2), "b": (0, 0), "c": (-1, 0)}
    finish(core)
