"""Small emulated engines, whose steps can be computed by hand."""

from collections.abc import Iterable

from sterna.engine.drains import DrainOutcome
from sterna.engine.emulated.config import EmulatedEngineConfig, StepMode
from sterna.engine.emulated.core import EmulatedCore, Step, Token
from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.requests import EmulatedRequest, RequestState
from sterna.migration.messages import Drain, Mode
from sterna.types import NORMAL, InstanceId, MigrationId, Priority, RequestId

STEP_TIME = StepTime(
    prefill_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0001,
    prefill_min_s=0.03,
    decode_s=0.02,
    decode_request_s=0.002,
    decode_token_s=0.0005,
)


def engine(num_blocks: int = 10, *, watermark: float = 0.1, **options: object) -> EmulatedCore:
    """An engine with blocks of four tokens, of which admissions leave a tenth free."""
    config = EmulatedEngineConfig(
        num_blocks=num_blocks,
        block_size=4,
        watermark=watermark,
        **options,  # type: ignore[arg-type]
    )
    return EmulatedCore(config, STEP_TIME)


def chunked(num_blocks: int = 10, *, watermark: float = 0.1, **options: object) -> EmulatedCore:
    """The same with chunked prefill."""
    return engine(num_blocks, watermark=watermark, step_mode=StepMode.CHUNKED, **options)


def request(
    name: str,
    prompt_tokens: int = 4,
    output_tokens: int = 100,
    *,
    arrival_s: float = 0.0,
    priority: Priority = NORMAL,
    num_output_tokens: int = 0,
    num_computed_tokens: int = 0,
) -> RequestState:
    return RequestState(
        request_id=RequestId(name),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        arrival_s=arrival_s,
        scheduling_priority=priority,
        execution_priority=priority,
        num_output_tokens=num_output_tokens,
        num_computed_tokens=num_computed_tokens,
    )


def add(core: EmulatedCore, *requests: RequestState) -> None:
    for each in requests:
        core.add(each)


def step(core: EmulatedCore) -> Step:
    """One step, from its beginning to its end."""
    begun, _ = step_with_tokens(core)
    return begun


def step_with_tokens(core: EmulatedCore) -> tuple[Step, tuple[Token, ...]]:
    begun = core.begin_step()
    return begun, core.end_step() if begun.scheduled else ()


def steps(core: EmulatedCore, num_steps: int) -> list[Step]:
    return [step(core) for _ in range(num_steps)]


def drain(
    core: EmulatedCore,
    name: str,
    *,
    num_preemptions: int = 0,
    first_block: int = 0,
    max_blocks: int | None = None,
) -> DrainOutcome:
    """Drain the request, with any number of blocks when none is given."""
    mode = Mode.RECOMPUTE if max_blocks is None else Mode.LIVE
    effect = Drain(
        MigrationId("m"), RequestId(name), mode, num_preemptions, first_block, max_blocks or 0
    )
    return core.begin_drain(effect)


def named(core: EmulatedCore, name: str) -> EmulatedRequest:
    (found,) = (each for each in core.requests() if each.request_id == name)
    return found


def queue(core: EmulatedCore) -> list[str]:
    """The queuing requests in their order."""
    return [each.request_id for each in core.view(InstanceId("i0")).queuing]


def batch(core: EmulatedCore) -> list[str]:
    """The running requests in the order in which they get memory, then the drained ones."""
    return [each.request_id for each in core.view(InstanceId("i0")).running]


def num_held(core: EmulatedCore) -> int:
    """The blocks that requests and moving prefixes hold, those of several counted once."""
    requests = list(core.requests())
    cached = {id(block) for each in requests for block in each.cached}
    cached |= {id(block) for block in core.kept_blocks}
    return len(cached) + sum(each.num_blocks - len(each.cached) for each in requests)


def names(scheduled: Iterable[tuple[RequestId, int]]) -> list[str]:
    return [request_id for request_id, _ in scheduled]
