"""Planted mistakes: each breaks a promise in some seed, which the simulator finds.

`python -m bench.simulation.sim_soak --planted` says after how many seeds each is found; here those
that are found within seconds are looked for at every run, and all of them by `make test-slow`.
"""

import pytest

from bench.simulation.sim_planted import MAX_SEEDS_A_MISTAKE
from fault_simulation.planted import MISTAKES, Mistake
from fault_simulation.run import run_seed

NUM_SEEDS_QUICK = 200

QUICK = {
    "source blocks freed before the last stage was sent": "is wrong",
    "the source resumes because nothing was heard": "has two owners",
    "the instance steps what it was told to end": "and was told to end it",
    "state of the request does not move along": "from another history than its client has",
    "a stream waits for a scheduler that died": "has not ended after",
    "the front end does not stop what no client waits for": "for which no client waits",
    "progress does not clear a suspect": "tokens since a death",
    "a request is judged by the first death": "by the first death that found it",
    "a suspect is judged by a death elsewhere": "no instance has died with it",
    "all suspects of a second death are judged guilty": "are judged guilty at once",
    "outputs are handed before the buddy has them": "does not have it",
    "what was refused is not told again": "has not ended after",
    "a silent instance is given up and not killed": "that has it lives",
    "the instance does not end when its lease does": "that has it lives",
    "the supervisor does not wait for a lease": "that has it lives",
    "the front end takes silence for denials": "and no instance that had it has failed",
    "the supervisor tries no failed start again": "are wanted",
    "a receiver does not ask for what is missing": "has not ended after",
    "the front end waits for tokens that were lost": "has not ended after",
    "the front end does not cut repeats": "from another history than its client has",
    "a receipt confirms what is missing": "which has not arrived",
    "repeated messages are handed over": "is the next",
    "a page behind the window is adopted": "wrong KV in group",
    "a KV cache group is not copied": "wrong KV in group",
    "the state is sent before the last stage": "is wrong",
    "a block that a window has left enters the prefix cache": "wrong KV in group",
    "blocks behind the window are not freed at the adoption": "39 of 40 blocks",
    "the source finds a stage's columns by its present length": "wrong KV in group",
    "the last stage sends the blocks of its plan": "is wrong",
    "a stage is written after its reservation was freed": "is wrong",
    "the destination does not know the length at the plan": "wrong KV in group",
    "a new scheduler does not get the whole prefix cache": "knows the prefix caches of",
    "evictions from the prefix cache are not reported": "too many",
    "adopted blocks in the prefix cache are not reported": "lacks",
    "the scheduler remembers the prefix cache of the dead": "knows the prefix caches of",
    "a copied prefix is entered one block off": "wrong KV in group",
    "a prefix whose copy was given up stays held": "still has requests [], 0 reservations",
}
"""What is found within NUM_SEEDS_QUICK seeds, and what is said of it."""


def violation(mistake: Mistake, num_seeds: int) -> str | None:
    """The first broken promise in so many seeds."""
    for seed in range(num_seeds):
        result = run_seed(seed, mistake.plan, mistake.cores)
        if result.violation is not None:
            return result.violation
    return None


def named(name: str) -> Mistake:
    (mistake,) = (each for each in MISTAKES if each.name == name)
    return mistake


@pytest.mark.parametrize(("name", "said"), QUICK.items(), ids=QUICK)
def test_a_planted_mistake_is_found_soon_and_the_violation_says_what_is_wrong(
    name: str, said: str
) -> None:
    found = violation(named(name), NUM_SEEDS_QUICK)
    assert found is not None
    assert said in found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [each.name for each in MISTAKES if each.name not in QUICK])
def test_every_planted_mistake_is_found(name: str) -> None:
    assert violation(named(name), MAX_SEEDS_A_MISTAKE) is not None
