"""What `sterna profile` reads of a vLLM engine core: the limits of its scheduler."""

from pathlib import Path
from typing import Any

import pytest

from sterna.engine.profiling.measurement_plan import Batch
from tests.engine.vllm_cores import SMALL, tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def profiled(core: Any) -> Any:
    """The core in the hands of a profile."""
    from sterna.engine.vllm.step_timing import ProfiledEngine

    engine = ProfiledEngine.__new__(ProfiledEngine)
    engine.core, engine.max_model_len = core, SMALL["max_model_len"]
    engine._seed, engine._num_requests, engine._token_ids = 1, 0, range(100, 200)
    return engine


def test_a_profile_has_the_limits_of_the_scheduler(tmp_path: Path) -> None:
    """These may be lower than the model runner's: as many requests as that has slots for never run
    together, so that a batch of them cannot be timed."""
    limits = {"max_num_active_seqs": 2, "max_num_scheduled_tokens": 40}
    scheduler = "sterna.engine.vllm.scheduler.MigratingScheduler"
    with tiny_core(tmp_path / "tiny", **SMALL, **limits, scheduler_cls=scheduler) as core:
        engine = profiled(core)
        found = engine.emulated()
        timing = engine.decode(Batch(found.max_num_seqs, 64), num_steps=2)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (2, 40)
    assert len(timing.steps_s) == 2
