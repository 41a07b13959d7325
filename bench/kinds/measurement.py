"""Measurement of one kind of model on two real instances.

A request goes to and fro between the instances while others decode beside it. Its tokens are
compared with those of a request with the same prompt that stays, beside the same neighbours. At the
end an instance is killed, and a request that has moved there goes on at the other one. Each request
has a cache salt of its own, so that none finds its prompt in the prefix cache.

Downtimes are those of `sterna bench migration`: the gap between the last token from the source and
the first one from the destination, less a decode step.
"""

import itertools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.common.machine import ForeignLoad
from bench.kinds.cases import Case
from bench.kinds.counting_instance import CountingInstance
from bench.kinds.findings import Found, Move, Recovery
from bench.kinds.workload import (
    MAX_OUTPUTS,
    NEIGHBOUR_TOKENS,
    PROMPT_TOKENS,
    RECOVERED_TOKENS,
    TOKENS_BEFORE_DEATH,
    TOKENS_BEFORE_MOVE,
    prompt_of,
    shares,
)
from bench.migration.cluster_driver import Driver
from bench.migration.session import INSTANCES, timed_move
from bench.migration.streams import Stream
from sterna.cli.serve.serve_command import engine_environment
from sterna.config import TransportConfig
from sterna.migration.messages import Mode


async def measure(
    case: Case, args: Namespace, folder: Path, num_moves: int, say: Callable[[str], None]
) -> Found:
    """Start two instances, measure, and end them.

    Args:
        args: the parsed arguments of `case.serve_arguments(folder)`.

    Raises:
        InstanceStartError: vLLM refused the model or its options.
        RuntimeError: a request did not move, or ended early.
    """
    driver = Driver(args, engine_environment(), TransportConfig(), actor_class=CountingInstance)
    try:
        await driver.start()
        found = await _Measurement(case, driver, folder, say).run(num_moves)
    except BaseException:
        driver.end()
        raise
    await driver.close()
    return found


class _Measurement:
    def __init__(
        self, case: Case, driver: Driver, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._case = case
        self._driver = driver
        self._folder = folder
        self._say = say
        self._salts = map(str, itertools.count())
        # Of each instance that lives.
        self._neighbours: dict[str, list[Stream]] = {instance: [] for instance in INSTANCES}

    async def run(self, num_moves: int) -> Found:
        config = json.loads((self._folder / "model" / "config.json").read_text())
        groups = tuple(await self._driver.call(INSTANCES[0], "kv_groups"))
        if (reason := await self._refusal()) is not None:
            return Found(config["model_type"], groups, reason)
        await self._warm_up()
        others = ForeignLoad()
        moves: list[Move] = []
        is_same = True
        for number, (num_prompt_tokens, count) in enumerate(shares(num_moves)):
            prompt = prompt_of(num_prompt_tokens, number)
            moved, stream = await self._moved(prompt, count)
            moves += moved
            expected = await self._unmoved(prompt, stream.num_outputs)
            is_same = is_same and stream.token_ids() == expected
            self._say(f"{len(moves)} of {num_moves} moves, tokens {_same(is_same)}")
        return Found(
            config["model_type"],
            groups,
            moves=tuple(moves),
            is_same=is_same,
            recovery=await self._recovery(),
            num_neighbours=len(self._neighbour_tokens),
            foreign_cores=others.cores(),
        )

    async def _refusal(self) -> str | None:
        """The name of the engine's or the request's feature that cannot move, if there is one."""
        facts = self._driver.facts[INSTANCES[0]]
        if facts.immovable_features:
            return "; ".join(facts.immovable_features)
        stream = self._submit(prompt_of(PROMPT_TOKENS[0], 0), INSTANCES[0])
        await stream.until_outputs(1)
        feature: str | None = await self._driver.call(
            INSTANCES[0], "immovable_feature", stream.request_id
        )
        await self._end(stream)
        return feature

    async def _warm_up(self) -> None:
        """Move to and fro, so that connections are open and memory is touched."""
        stream = self._submit(prompt_of(PROMPT_TOKENS[0], 0), INSTANCES[0])
        await stream.until_outputs(1)
        for destination in reversed(INSTANCES):
            await self._move(stream, destination)
        await self._end(stream)

    # ---------------------------------------------------------------------------- requests

    async def _moved(self, prompt: Sequence[int], count: int) -> tuple[list[Move], Stream]:
        """The moves of a request that begins on the first instance, and the request."""
        await self._begin_neighbours()
        stream = self._submit(prompt, INSTANCES[0])
        await stream.until_outputs(1)
        moves = []
        for _ in range(count):
            neighbours = self._neighbours[stream.instance]
            taken = await timed_move(self._driver, stream, neighbours, Mode.LIVE)
            moves.append(Move(taken, await self._stage_bytes(stream.instance)))
        await self._end(stream)
        return moves, stream

    async def _unmoved(self, prompt: Sequence[int], num_outputs: int) -> list[int]:
        """The tokens of a request that stays, beside the same neighbours."""
        await self._begin_neighbours()
        stream = self._submit(prompt, INSTANCES[0], num_outputs)
        await stream.until_outputs(num_outputs)
        await self._end(stream)
        return stream.token_ids()

    async def _recovery(self) -> Recovery:
        """Kill the second instance with a request that has moved there, and continue the request on
        the first one."""
        prompt = prompt_of(PROMPT_TOKENS[-1], 50)
        expected = await self._unmoved(prompt, RECOVERED_TOKENS)
        await self._begin_neighbours()
        here, there = INSTANCES
        stream = self._submit(prompt, here, RECOVERED_TOKENS)
        await stream.until_outputs(TOKENS_BEFORE_MOVE)
        await self._move(stream, there)
        await stream.until_outputs(TOKENS_BEFORE_DEATH)
        self._say("killing one instance; Ray prints that a worker has died")
        await self._driver.kill(there)
        del self._neighbours[there]
        self._driver.send_again(stream, here)
        num_before = stream.num_outputs
        await stream.until_outputs(RECOVERED_TOKENS)
        found = stream.token_ids()
        await self._end(stream)
        self._say(f"the request went on at the other one, tokens {_same(found == expected)}")
        if found == expected:
            return Recovery.SAME
        # vLLM computes the KV cache of a preempted request again, too: all at once, which on some
        # backends gives other numbers than one token after the other.
        given = [*prompt, *found[:num_before]]
        alone = await self._unmoved(given, RECOVERED_TOKENS - num_before)
        is_vllms = found[num_before:] == alone
        self._say(f"beside a request with these tokens as its prompt: {_same(is_vllms)}")
        return Recovery.AS_RECOMPUTED if is_vllms else Recovery.OTHER

    async def _move(self, stream: Stream, destination: str) -> None:
        """Move a request without timing it."""
        await self._driver.move(stream, destination, Mode.LIVE)
        await stream.until(lambda: stream.arrivals[-1].instance == destination)
        await self._stage_bytes(destination)

    async def _stage_bytes(self, destination: str) -> tuple[int, ...]:
        """The bytes of each stage of the only migration to the instance since the last call."""
        (stages,) = await self._driver.call(destination, "take_stage_bytes")
        return tuple(stages[number] for number in sorted(stages))

    async def _begin_neighbours(self) -> None:
        for place, (instance, streams) in enumerate(self._neighbours.items()):
            streams += [
                self._submit(prompt_of(num_tokens, 100 + 10 * place + number), instance)
                for number, num_tokens in enumerate(self._neighbour_tokens)
            ]
        for stream in self._all_neighbours():
            await stream.until_outputs(1)

    @property
    def _neighbour_tokens(self) -> tuple[int, ...]:
        return () if self._case.is_alone else NEIGHBOUR_TOKENS

    def _all_neighbours(self) -> Iterator[Stream]:
        return itertools.chain(*self._neighbours.values())

    async def _end(self, stream: Stream) -> None:
        """End the request and its neighbours, and wait until the instances hold nothing."""
        for each in (stream, *self._all_neighbours()):
            if not each.is_finished:
                self._driver.abort(each)
        for streams in self._neighbours.values():
            streams.clear()
        await self._driver.until_idle()

    def _submit(
        self, prompt: Sequence[int], instance: str, num_outputs: int = MAX_OUTPUTS
    ) -> Stream:
        """Send a request that decodes until it is aborted, or has this number of outputs."""
        question = self._case.ask(prompt, self._folder, self._driver.vllm_config)
        return self._driver.submit(
            {**question.prompt, "cache_salt": next(self._salts)},
            instance,
            num_outputs=num_outputs,
            more=question.more,
        )


def _same(is_same: bool) -> str:
    return "the same" if is_same else "DIFFER"
