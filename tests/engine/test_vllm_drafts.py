"""Drafts of speculative decoding in vLLM's scheduler: which are kept, and what does not move.

Tokens and drafts are the test's, so that no engine has to draft.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sterna.engine.drains import Left
from sterna.migration.messages import Drain, Mode, Reason
from sterna.types import InstanceId, MigrationId, RequestId
from tests.engine.test_vllm_histories import wire_request
from tests.engine.vllm_cores import SMALL, tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_DRAFTS = 3
A = RequestId("a")
DRAIN = Drain(MigrationId("i0-1"), A, Mode.LIVE, 0, 0, 9)


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        **SMALL,
    ) as core:
        yield core


def speculative(core: Any, **changes: Any) -> Any:
    """The core's configuration with drafts of n-grams."""
    from vllm.config import SpeculativeConfig

    config = copy.deepcopy(core.vllm_config)
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=NUM_DRAFTS,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    for name, value in changes.items():
        setattr(config.speculative_config, name, value)
    return config


class Steps:
    """A scheduler whose steps say and draft what the test says."""

    def __init__(self, core: Any, config: Any, *, is_async: bool = False) -> None:
        from sterna.engine.vllm.scheduler import MigratingAsyncScheduler, MigratingScheduler

        config.scheduler_config.async_scheduling = is_async
        self._core = core
        self.scheduler = (MigratingAsyncScheduler if is_async else MigratingScheduler)(
            vllm_config=config,
            kv_cache_config=core.scheduler.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=core.scheduler.block_size,
            hash_block_size=core.scheduler.hash_block_size,
            log_stats=True,
        )
        self._steps: list[Any] = []

    def add(self, name: str, **case: Any) -> Any:
        request, _ = self._core.preprocess_add_request(wire_request(name, case))
        self.scheduler.add_request(request)
        return request

    def adopt(self, name: str, drafts: Sequence[int]) -> Any:
        """Add a request that has moved here with two outputs and these drafts."""
        migration = MigrationId("m")
        columns = self.scheduler.groups.stage_columns(0, 4, 80, is_last=True)
        reserved = self.scheduler.reserve(migration, columns, needs_slot=True)
        assert not isinstance(reserved, Reason)
        request, _ = self._core.preprocess_add_request(wire_request(name, {}))
        request.append_output_token_ids([11, 12])
        self.scheduler.adopt_running(migration, request, request.num_tokens - 1, drafts)
        return request

    def begin(self) -> Any:
        self._steps.append(self.scheduler.schedule())
        return self._steps[-1]

    def end(self, token_ids: Sequence[int], drafts: Sequence[int] | None = None) -> None:
        """End the oldest step, which says these tokens for each of its requests."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        names = list(self._steps[0].num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[list(token_ids) for _ in names],
        )
        self.scheduler.update_from_output(self._steps.pop(0), output)
        if drafts is not None:
            each = DraftTokenIds(names, [list(drafts) for _ in names])
            self.scheduler.update_draft_token_ids(each)


def test_a_drained_request_keeps_its_drafts(vllm_core: Any) -> None:
    steps = Steps(vllm_core, speculative(vllm_core))
    request = steps.add("a")
    steps.begin()
    steps.end([7], drafts=[8, 9, 10])
    assert steps.begin().scheduled_spec_decode_tokens == {"a": [8, 9, 10]}
    # Two of the drafts were right.
    steps.end([8, 9, 21], drafts=[22, 23, 24])
    assert isinstance(steps.scheduler.begin_drain(DRAIN), Left)
    assert steps.scheduler.is_drained(A)
    assert request.num_computed_tokens == request.num_tokens - 1
    assert request.spec_token_ids == [22, 23, 24]
    steps.scheduler.resume(A)
    assert steps.begin().scheduled_spec_decode_tokens == {"a": [22, 23, 24]}


def test_drafts_are_counted_by_position_since_the_start(vllm_core: Any) -> None:
    steps = Steps(vllm_core, speculative(vllm_core))
    steps.add("a")
    for token_ids in ([7], [8, 9, 21], [8, 22]):
        steps.begin()
        steps.end(token_ids, drafts=[8, 9, 10])
    view = steps.scheduler.view(InstanceId("i0"), is_terminating=False)
    assert view.draft_counts == (2, 6, 2, 1, 0)


def test_drafts_whose_probabilities_are_elsewhere_are_dropped(vllm_core: Any) -> None:
    config = speculative(vllm_core, draft_sample_method="probabilistic")
    steps = Steps(vllm_core, config)
    request = steps.add("a")
    steps.begin()
    steps.end([7], drafts=[8, 9, 10])
    assert isinstance(steps.scheduler.begin_drain(DRAIN), Left)
    assert request.spec_token_ids == []


def test_asynchronous_scheduling_has_no_drafts_to_keep(vllm_core: Any) -> None:
    """But placeholders, which stand for those of the step before."""
    steps = Steps(vllm_core, speculative(vllm_core), is_async=True)
    scheduler = steps.scheduler
    request = steps.add("a")
    steps.begin()
    steps.begin()
    steps.end([7])
    steps.begin()
    position = scheduler.progress(A)
    assert position is not None
    assert position.num_valid_tokens == request.num_tokens - 1
    assert isinstance(scheduler.begin_drain(DRAIN), Left)
    assert not scheduler.is_drained(A)
    steps.end([8, 9])
    assert not scheduler.is_drained(A)
    steps.end([10, 11, 12, 13])
    assert scheduler.is_drained(A)
    assert request.num_computed_tokens == request.num_tokens - 1
    assert request.spec_token_ids == []
    scheduler.resume(A)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


@pytest.mark.parametrize("case", [{"stop_token_ids": [99]}, {"max_tokens": 3}])
def test_a_drain_ends_where_the_request_ends_among_its_drafts(
    vllm_core: Any, case: dict[str, Any]
) -> None:
    """The drafts behind the last token were right, but are no outputs."""
    steps = Steps(vllm_core, speculative(vllm_core), is_async=True)
    scheduler = steps.scheduler
    request = steps.add("a", **case)
    steps.begin()
    steps.begin()
    steps.end([7])
    assert isinstance(scheduler.begin_drain(DRAIN), Left)
    assert not scheduler.is_drained(A)
    steps.end([8, 99, 10, 11])
    assert list(request.output_token_ids) == [7, 8, 99]
    assert scheduler.is_drained(A)
    assert scheduler.drained_request(A) is None
    # The slot is free again.
    assert scheduler._num_held_slots() == 0


@pytest.mark.parametrize(
    ("num_drafts", "is_async", "expected"),
    [(NUM_DRAFTS, False, [5, 6, 7]), (2, False, [5, 6]), (0, False, []), (NUM_DRAFTS, True, [])],
)
def test_an_adopted_request_has_the_drafts_that_fit(
    vllm_core: Any, num_drafts: int, is_async: bool, expected: list[int]
) -> None:
    config = speculative(vllm_core, num_speculative_tokens=num_drafts or 1)
    if not num_drafts:
        config.speculative_config = None
    steps = Steps(vllm_core, config, is_async=is_async)
    request, scheduler = steps.adopt("a", [5, 6, 7]), steps.scheduler
    assert request.spec_token_ids == expected
    # Its table has no more blocks than its tokens need, whatever was reserved.
    assert len(scheduler.groups.block_ids(A)[0]) == -(-request.num_tokens // 32)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1 + len(expected)}


@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_the_drafts_of_an_adopted_request_are_counted(vllm_core: Any, level: str) -> None:
    """vLLM counts those of requests that its own queue has taken."""
    config = speculative(vllm_core)
    config.observability_config.per_request_spec_decode_metrics = level
    steps = Steps(vllm_core, config)
    request = steps.adopt("a", [5, 6, 7])
    steps.begin()
    steps.end([5, 6, 21])
    counted = request.spec_decode_metrics
    if level == "none":
        assert counted is None
    else:
        assert (counted.num_draft_tokens, counted.histogram) == (3, [0, 0, 1, 0])
        assert counted.per_step_accepted == [2] * (level == "detailed")


def test_methods_with_other_state_do_not_move(vllm_core: Any) -> None:
    from sterna.engine.vllm.support import immovable_engine_features

    cache = vllm_core.scheduler.kv_cache_config
    config = speculative(vllm_core)
    assert immovable_engine_features(config, cache) == ()
    config = speculative(vllm_core, method="suffix")
    expected = ("speculative decoding by suffix",)
    assert immovable_engine_features(config, cache) == expected


def test_several_layers_for_coming_tokens_do_not_move(vllm_core: Any) -> None:
    from sterna.engine.vllm.support import immovable_engine_features

    cache = vllm_core.scheduler.kv_cache_config
    config = speculative(vllm_core, method="mtp")
    assert immovable_engine_features(config, cache) == ()
    hf_config = copy.deepcopy(config.model_config.hf_config)
    hf_config.num_nextn_predict_layers = 2
    config.speculative_config.draft_model_config = copy.copy(config.model_config)
    config.speculative_config.draft_model_config.hf_config = hf_config
    expected = ("multi-token prediction with several modules",)
    assert immovable_engine_features(config, cache) == expected


def test_recurrent_states_with_drafts_do_not_move(vllm_core: Any) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    from sterna.engine.vllm.support import immovable_engine_features

    cache = copy.copy(vllm_core.scheduler.kv_cache_config)
    (group,) = cache.kv_cache_groups
    state = MambaSpec(block_size=512, shapes=((4, 8),), dtypes=(torch.float32,))
    cache.kv_cache_groups = [group, replace(group, kv_cache_spec=state)]
    assert immovable_engine_features(vllm_core.vllm_config, cache) == ()
    expected = ("speculative decoding with recurrent states",)
    assert immovable_engine_features(speculative(vllm_core), cache) == expected


def test_inputs_of_which_tokens_are_dropped_do_not_move(vllm_core: Any) -> None:
    from vllm.config.multimodal import MultiModalConfig

    from sterna.engine.vllm.support import immovable_engine_features

    cache = vllm_core.scheduler.kv_cache_config
    config = copy.deepcopy(vllm_core.vllm_config)
    config.model_config.multimodal_config = MultiModalConfig()
    assert immovable_engine_features(config, cache) == ()
    config.model_config.multimodal_config = MultiModalConfig(video_pruning_rate=0.5)
    expected = ("pruning of multimodal inputs",)
    assert immovable_engine_features(config, cache) == expected
