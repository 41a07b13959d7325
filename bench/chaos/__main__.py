"""Injects faults into the processes of a real server under streams whose every token is known.

The right answers come from one undisturbed engine. Then, for `--minutes`, one fault after the other
hits a server of two instances and two front ends, every 15 to 30 seconds: an instance, a front end,
the scheduler, the supervisor, the driver or Ray's GCS is killed, stopped, or has all its
connections cut. Between two faults the server becomes whole again, and requests are moved on
purpose. A client whose connection broke resumes its stream; when a component fails that only
manages, three more clients send short requests. Everything runs in float32, so that the tokens of a
request do not depend on the rest of its batch. Exits with 1 if a promise was broken.

    sterna bench chaos [--minutes 10] [--quick] [--crowded]

`bench/results/chaos.json` has a `summary` (`requests, failed, tokens_lost, tokens_repeated,
tokens_changed, gap_s, wait_s`), a row for each kind of fault, and the `goals` for gaps and waits:
these depend on the machine, and a missed goal is no broken promise. With `--crowded` instances have
places for fewer requests than there are, so that the others wait at the scheduler:
`chaos_crowded.json` has no goals, since gaps and waits are mostly those of the queue.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.chaos.clients import KINDS, PLAIN_KINDS, ask_all, questions
from bench.chaos.faults import FAULTS
from bench.chaos.goals import goals_of
from bench.chaos.report import broken_promises, markdown, rows_of, summary_of
from bench.chaos.storm import NUM_INSTANCES, NUM_OF, VISIT_TOKENS, Storm, say
from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.pages import write_marked
from bench.serving.comparing import PAGE, QUICK_FOLDER
from bench.serving.measured import LOGS
from bench.serving.served import served
from bench.serving.target import find_target
from sterna.errors import ConfigurationError, SternaError

NAME = "chaos"
COMMAND = f"sterna bench {NAME}"

FLOAT32 = ("--dtype", "float32", "--max-model-len", "2048")
"""For longer sequences an instance would need more memory than it takes by default."""

SERVER = (
    *("--instances", str(NUM_INSTANCES), "--frontends", str(NUM_OF["front-end"])),
    "--resumable-streams",
)

CROWDED = ("--max-num-seqs", "3")
NUM_STREAMS, NUM_CROWDED_STREAMS = 6, 10

PAUSE_S = (15.0, 30.0)
QUICK_PAUSE_S = (4.0, 8.0)
"""Time from one fault to the next, unless the server takes longer to become whole again."""

NUM_SHORT = 10
"""Number of short requests for the clients that arrive after a fault."""

RECOVERY_S = 3.0
"""A gap that began within this time after a fault counts as its effect."""


class PromiseBrokenError(SternaError):
    """A promise was broken, such as by a lost request or token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)g")
    parser.add_argument(
        "--crowded", action="store_true", help="more requests at once than the instances take"
    )
    parser.add_argument(
        "--streams",
        type=positive,
        help=f"at once (default: {NUM_STREAMS}; {NUM_CROWDED_STREAMS} with --crowded)",
    )
    parser.add_argument("--tokens", type=positive, default=300, help="of each (default: 300)")
    parser.add_argument("--questions", type=positive, default=25, help="default: 25")
    parser.add_argument("--seed", type=int, default=1, help="of faults and prompts (default: 1)")
    parser.add_argument(
        "--only", nargs="+", choices=FAULTS, default=FAULTS, help="kinds of faults (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a minute on emulated instances")
    parser.add_argument("--results", type=Path, help="folder of the result file")
    options = parser.parse_args(argv)
    if options.streams is None:
        options.streams = NUM_CROWDED_STREAMS if options.crowded else NUM_STREAMS
    end_like_ctrl_c()
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    log = LOGS / NAME / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    engine = ["--engine", "emulated"] if options.quick else [*FLOAT32]
    kinds = PLAIN_KINDS if options.quick else tuple(KINDS)
    pause_s = QUICK_PAUSE_S if options.quick else PAUSE_S
    minutes = 1.0 if options.quick else options.minutes
    with served([*engine, "--instances", "1"], log=log.with_name("lone.log")) as url:
        target = asyncio.run(find_target(url))
        asked = questions(target.model, options.questions, options.tokens, options.seed, kinds)
        visits = questions(
            target.model, NUM_SHORT, VISIT_TOKENS, options.seed, PLAIN_KINDS, first=len(asked)
        )
        say(f"{len(asked) + len(visits)} questions to one undisturbed engine")
        known = asyncio.run(ask_all(target, [*asked, *visits], num_at_once=4))
    expected = {each.question.number: each.tokens for each in known}
    failed = [each.error for each in known if each.error is not None]
    if failed:
        raise ConfigurationError(f"the undisturbed engine did not answer: {failed[0]}")
    server = [*engine, *SERVER, *(CROWDED if options.crowded else ())]
    with served(server, log=log) as url:
        target = asyncio.run(find_target(url))
        say(f"{minutes:g} minutes of faults on two instances")
        storm = Storm(
            target=target,
            log=log,
            asked=asked,
            visits=visits,
            kinds=options.only,
            num_streams=options.streams,
            pause_s=pause_s,
            seed=options.seed,
        )
        asyncio.run(storm.run(60.0 * minutes))
    _write(options, storm, expected, minutes, server)


def _write(
    options: argparse.Namespace,
    storm: Storm,
    expected: dict[int, dict[int, list[int]]],
    minutes: float,
    server: list[str],
) -> None:
    rows = rows_of(storm.faults, storm.moves, storm.answers, RECOVERY_S)
    summary = summary_of(rows, storm.answers, expected, len(storm.held))
    is_crowded = options.crowded
    config = {
        "server": server,
        "is_crowded": is_crowded,
        "minutes": minutes,
        "streams": options.streams,
        "tokens": options.tokens,
        "questions": options.questions,
        "faults": list(options.only),
        "seed": options.seed,
    }
    folder = options.results or (QUICK_FOLDER if options.quick else results_io.RESULTS)
    errors = sorted({each.error for each in storm.answers if each.error is not None})
    goals = [] if is_crowded else goals_of(rows, summary)
    more = {"goals": [asdict(each) for each in goals], "errors": errors}
    name, command = (f"{NAME}_crowded", f"{COMMAND} --crowded") if is_crowded else (NAME, COMMAND)
    path = results_io.write(name, config, rows, folder, summary=summary, more=more)
    text = markdown(results_io.read(name, folder))
    print(text)
    say(f"wrote {path}")
    if folder.resolve() == results_io.RESULTS:
        write_marked(PAGE, command, text)
    if broken := broken_promises(summary, rows, is_crowded=is_crowded):
        raise PromiseBrokenError(f"{', '.join(broken)}: {path} and {LOGS / NAME} tell more")


if __name__ == "__main__":
    sys.exit(main())
