"""Views of the real engine, and when they are published, with a core that is stepped by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sterna.engine.drains import Left
from sterna.migration.messages import Drain, Mode
from sterna.types import OUTPUT_LENGTHS, InstanceId, InstanceView, MigrationId, RequestId
from tests.engine.test_vllm_scheduler import add, step, with_scheduler
from tests.engine.vllm_cores import SMALL, tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with tiny_core(folder, max_model_len=512, block_size=32, max_num_batched_tokens=96) as core:
        yield core


def test_what_a_step_computes_is_shown_before_it_is_computed(
    vllm_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with a long prompt may take seconds: meanwhile, the cluster's scheduler has to know
    that the request runs here."""
    from sterna.engine.vllm.step_thread import Views

    core = with_scheduler(vllm_core, max_num_seqs=1)
    shown: list[InstanceView] = []
    when_computed: list[InstanceView] = []
    execute = core.model_executor.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        when_computed.append(shown[-1])
        return execute(*args, **kwargs)

    monkeypatch.setattr(core.model_executor, "execute_model", execute_model)
    views = Views(InstanceId("i0"), shown.append, lambda changes: None)
    views.follow(core)

    def names(view: InstanceView) -> tuple[list[str], list[str]]:
        return [r.request_id for r in view.running], [r.request_id for r in view.queuing]

    add(core, A, 40, output_tokens=2)
    add(core, B, 40, output_tokens=1)
    while core.scheduler.has_requests():
        step(core)
        views.on_step_end(core)
    # The last step has nothing to compute: by it, vLLM's worker hears of the last end.
    states = [([A], [B]), ([A], [B]), ([B], []), ([], [])]
    assert [names(each) for each in when_computed] == states
    assert [names(each) for each in shown] == states
    assert shown[0].running[0].physical_usage_tokens == 64
    assert shown[-1].reserved_tokens == shown[-1].shared_tokens == 0
    assert {each.num_slots for each in shown} == {1}


def test_outputs_that_end_here_are_counted_by_length_and_those_that_leave_are_not(
    vllm_core: Any,
) -> None:
    core = with_scheduler(vllm_core)
    for request_id, output_tokens in ((A, 3), (B, 40), (C, 50)):
        add(core, request_id, 8, output_tokens=output_tokens)
    step(core)
    drain = Drain(MigrationId("m"), C, Mode.LIVE, 0, 0, max_blocks=10)
    assert isinstance(core.scheduler.begin_drain(drain), Left)
    core.scheduler.release(C)
    for _ in range(20):
        step(core)
    core.abort_requests([B])
    counts = core.scheduler.view(InstanceId("i0"), False).num_ended
    assert {OUTPUT_LENGTHS[k]: num for k, num in enumerate(counts) if num} == {0: 1, 16: 1}


def test_tokens_that_a_kv_connector_has_are_counted_since_the_start(vllm_core: Any) -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats

    scheduler = with_scheduler(vllm_core, log_stats=True).scheduler
    for num_tokens, num_hits in ((200, 96), (50, 32)):
        scheduler.connector_prefix_cache_stats = PrefixCacheStats(queries=num_tokens, hits=num_hits)
        scheduler.make_stats()
    assert scheduler.view(InstanceId("i0"), False).external_counts == (250, 128)


def test_tokens_that_the_prefix_cache_has_are_counted_once_a_request(tmp_path: Path) -> None:
    with tiny_core(tmp_path / "tiny", **SMALL, enable_prefix_caching=True) as vllm_core:
        core = with_scheduler(vllm_core, prefix_caching=True, log_stats=True)
        shown: list[InstanceView] = []
        show = core.scheduler.view
        core.scheduler.on_scheduled = [lambda _: shown.append(show(InstanceId("i0"), False))]
        for request_id in (A, B):
            add(core, request_id, 100, output_tokens=3)
            while core.scheduler.has_requests():
                step(core)
        view = core.scheduler.view(InstanceId("i0"), False)
        # The second request finds the three whole blocks of the first.
        assert (view.num_prefix_tokens, view.num_prefix_hits) == (200, 96)
        found = [(r.request_id, r.num_shared_tokens) for each in shown for r in each.running]
        # The first prompt takes two steps.
        assert found == [(A, 0)] * 4 + [(B, 96)] * 3
