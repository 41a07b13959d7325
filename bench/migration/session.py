"""Migrates requests between two real instances and measures the delays for their clients.

The migrated request goes back and forth, so that one prefill is enough for many samples. It starts
at the cell's length less the tokens that are decoded before the first move, and is replaced when it
has grown by an eighth.

Busy instances each run the same batch for every length of the migrated request: 8 requests
that begin with 1k tokens, "a batch of requests with the same total length of 8k on both
instances" (Section 6.2). (The paper's batch has requests of the cell's length; with one batch
for all lengths, only the length differs between cells.)
"""

import itertools
import random
import time
from collections.abc import Mapping, Sequence

from bench.migration.cluster_driver import Driver
from bench.migration.plan import turns
from bench.migration.samples import Sample, sample
from bench.migration.streams import Stream
from sterna.migration.messages import Mode

INSTANCES = ("i0", "i1")
BATCH_SIZE, BATCH_TOKENS = 8, 1024
STEPS_BEFORE, STEPS_AFTER = 6, 5
"""Decode steps timed before the order and after the first token on the destination."""

MAX_GROWTH = 1 / 8
WARM_UP_TOKENS = 256
MAX_TOKENS = 16384
VOCABULARY = 40_000
"""Random token ids are below this; SmolLM2's special tokens are below 20 and do not matter in a
prompt."""

ENGINE_OPTIONS = (
    # Otherwise a recompute would find its prompt in the cache.
    "--no-enable-prefix-caching",
    # Room for a request of 8k tokens that continues to decode. The text does not matter.
    f"--max-model-len={MAX_TOKENS}",
    f'--hf-overrides={{"max_position_embeddings": {MAX_TOKENS}}}',
    f"--kv-cache-memory-bytes={1 << 30}",
)


class Session:
    """Two instances, with or without batches of their own."""

    def __init__(self, driver: Driver, *, busy: bool, seed: int) -> None:
        self._driver = driver
        self._is_busy = busy
        self._random = random.Random(seed)
        self._batches: dict[str, list[Stream]] = {instance: [] for instance in INSTANCES}

    async def warm_up(self, modes: Sequence[Mode]) -> None:
        """Migrate to and fro in each mode, so that connections are open and memory is touched."""
        migrant = await self._begin(WARM_UP_TOKENS)
        for mode in modes:
            for _ in INSTANCES:
                await self._migrate(migrant, mode)
        self._driver.abort(migrant)
        await self._driver.until_idle()

    async def samples(self, tokens: int, counts: Mapping[Mode, int]) -> dict[Mode, list[Sample]]:
        """Migrates in each mode as often as `counts` says, in turns, at `tokens` tokens."""
        if self._is_busy:
            await self._begin_batches()
        taken: dict[Mode, list[Sample]] = {mode: [] for mode in counts}
        migrant: Stream | None = None
        for mode in turns(counts):
            if migrant is not None and migrant.num_tokens > tokens * (1 + MAX_GROWTH):
                self._driver.abort(migrant)
                migrant = None
            if migrant is None:
                migrant = await self._begin(tokens)
            taken[mode].append(await self._migrate(migrant, mode))
        if migrant is not None:
            self._driver.abort(migrant)
        await self._end_batches()
        return taken

    async def _begin(self, tokens: int) -> Stream:
        migrant = self._submit(tokens - STEPS_BEFORE - 1, INSTANCES[0])
        await migrant.until_outputs(1)
        return migrant

    async def _migrate(self, migrant: Stream, mode: Mode) -> Sample:
        return await timed_move(self._driver, migrant, self._batches[migrant.instance], mode)

    async def _begin_batches(self) -> None:
        for instance in INSTANCES:
            for _ in range(BATCH_SIZE):
                self._batches[instance].append(self._submit(BATCH_TOKENS, instance))
        for stream in itertools.chain(*self._batches.values()):
            await stream.until_outputs(1)

    async def _end_batches(self) -> None:
        for streams in self._batches.values():
            for stream in streams:
                self._driver.abort(stream)
            streams.clear()
        await self._driver.until_idle()

    def _submit(self, num_prompt_tokens: int, instance: str) -> Stream:
        """Send a request with a random prompt that decodes until it is aborted."""
        prompt = [self._random.randrange(VOCABULARY) for _ in range(num_prompt_tokens)]
        return self._driver.submit(prompt, instance, num_outputs=MAX_TOKENS - num_prompt_tokens)


async def timed_move(
    driver: Driver, migrant: Stream, neighbours: Sequence[Stream], mode: Mode
) -> Sample:
    """Migrate the request to the other instance, and time its tokens before and after the move.

    Args:
        neighbours: the other requests on the source.
    """
    destination = INSTANCES[1 - INSTANCES.index(migrant.instance)]
    begun_s = time.monotonic()
    await migrant.until_outputs(migrant.num_outputs + STEPS_BEFORE + 1)
    ordered_s = time.monotonic()
    report = await driver.move(migrant, destination, mode)
    await migrant.until(lambda: _num_trailing(migrant, destination) > STEPS_AFTER)
    moments = {instance: await driver.call(instance, "take_moments") for instance in INSTANCES}
    return sample(
        migrant.request_id,
        migrant.arrivals,
        [neighbour.arrivals for neighbour in neighbours],
        moments,
        begun_s=begun_s,
        ordered_s=ordered_s,
        stages=report["stages"],
        suspended_ms=report["suspended_ms"],
    )


def _num_trailing(stream: Stream, instance: str) -> int:
    """The number of its last arrivals that came from this instance."""
    trailing = itertools.takewhile(lambda a: a.instance == instance, reversed(stream.arrivals))
    return sum(1 for _ in trailing)
