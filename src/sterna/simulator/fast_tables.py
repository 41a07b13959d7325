"""Tables of the compiled engines for one simulation, from its trace and configuration."""

from dataclasses import dataclass, fields

import numpy as np

from sterna.config import PolicyConfig, Victim
from sterna.engine.emulated.compiled.tables import (
    FREEING,
    LAST_STARTED,
    LONGEST,
    NEVER,
    NO_VICTIM,
    NONE,
    REQUEST,
    SETTINGS,
    SHORTEST,
    Contents,
    Table,
    Tables,
    make_contents,
    make_tables,
)
from sterna.engine.emulated.config import Preemption, StepMode
from sterna.policy.load_report import LARGE_SHARE
from sterna.simulator.config import Report, SimulationConfig
from sterna.workload.block_hashes import BlockHashes
from sterna.workload.trace import Trace

VICTIMS = {
    Victim.SHORTEST: SHORTEST,
    Victim.LONGEST: LONGEST,
    Victim.LAST_STARTED: LAST_STARTED,
    Victim.FREEING: FREEING,
}
"""The rules that the compiled `reports.find_victim` has; for others, the plain engines run."""


def looks_at_requests(policy: PolicyConfig) -> bool:
    """Whether loads follow from a look at each request, which the compiled steps do not have."""
    has_order = policy.own is not None and policy.own.chooses_victims
    return has_order or policy.balance_horizon_steps is not None


@dataclass(slots=True)
class Columns:
    """Fields of the engines' rows, read and written as plain numbers.

    This is ten times as fast as with numpy's scalars.
    """

    step_end_s: memoryview
    is_stepping: memoryview
    is_held: memoryview
    has_changed: memoryview
    num_running: memoryview
    num_queuing: memoryview
    num_drained: memoryview
    num_held_slots: memoryview
    free_blocks: memoryview
    used_blocks: memoryview
    reserved_blocks: memoryview
    num_preemptions: memoryview

    @classmethod
    def of(cls, tables: Tables) -> "Columns":
        """The columns of these tables; new tables need new columns."""
        return cls(*(memoryview(tables.rows[each.name]) for each in fields(cls)))


def tables_of(
    trace: Trace, config: SimulationConfig, known: BlockHashes | None
) -> tuple[Tables, Contents]:
    """Tables with a row for each request of the trace and each instance that it starts with.

    Args:
        known: the requests' block hashes, if the engines have prefix caches.
    """
    requests, hashes = _requests(trace, config), np.zeros(0, np.int64)
    if known is not None:
        hashes = known.hashes
        requests["num_hashes"] = np.diff(known.end, prepend=0)
        requests["first_hash"] = known.end - requests["num_hashes"]
    tables = make_tables(requests, _settings(config), config.num_instances)
    return tables, make_contents(tables, hashes)


def _requests(trace: Trace, config: SimulationConfig) -> Table:
    requests = np.zeros(len(trace), REQUEST)
    for name in ("first_scheduled_s", "first_token_s", "end_s", "preempted_s"):
        requests[name] = np.nan
    requests["arrival_s"] = trace.arrival_s
    requests["prompt_tokens"] = trace.input_tokens
    requests["output_tokens"] = trace.output_tokens
    if config.policy.has_priorities:
        requests["priority"] = trace.priority
    requests["before"] = requests["behind"] = NONE
    if trace.turns is not None:
        requests["has_next"] = trace.turns.next() != NONE
    return requests


def _settings(config: SimulationConfig) -> Table:
    engine, step_time, policy = config.engine, config.step_time, config.policy
    settings = np.zeros(1, SETTINGS)
    for name in (
        "prefill_s",
        "prefill_token_s",
        "prefill_pair_s",
        "prefill_min_s",
        "decode_s",
        "decode_request_s",
        "decode_token_s",
    ):
        settings[name] = getattr(step_time, name)
    for name in (
        "num_blocks",
        "block_size",
        "watermark_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
    ):
        settings[name] = getattr(engine, name)
    settings["is_chunked"] = engine.step_mode is StepMode.CHUNKED
    settings["is_by_arrival"] = engine.preemption is Preemption.LATEST_ARRIVED
    settings["is_by_urgency"] = engine.preemption is Preemption.LEAST_URGENT
    settings["min_free_blocks"] = engine.keeps_block_free
    settings["is_live"] = config.report is Report.LIVE
    settings["is_by_step"] = config.report is Report.STEP
    settings["victim"] = VICTIMS[policy.victim] if policy.migrates else NO_VICTIM
    settings["balances"] = policy.balance_ratio is not None
    settings["balance_after_tokens"] = policy.balance_after_tokens
    settings["has_priorities"] = policy.has_priorities
    is_large_above = int(LARGE_SHARE * engine.total_tokens)
    settings["large_tokens"] = is_large_above if policy.binds_late else NEVER
    settings["prefix_caching"] = engine.prefix_caching
    return settings
