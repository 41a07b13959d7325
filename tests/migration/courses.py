"""What golden transcripts have in common.

Each line is one event: the machine (A the source, B the destination), what it was told, and what
it wants done.
"""

from sterna.migration.messages import ClientAborted, Reason
from tests.migration.machines import inspected

STAGE_0 = [
    "A start: Inspect",
    "A Inspected: send Reserve 0 (blocks 0+8)",
    "B Reserve 0 (blocks 0+8): ReserveBlocks 0 (blocks 0+8)",
    "B BlocksReserved: send Reserved 0",
    "A Reserved 0: CopyBlocks 0 (blocks 0+8)",
    "B StageReceived: send StageCopied 0",
    "A StageCopied 0: Inspect",
]
UNTIL_DRAIN = [
    *STAGE_0,
    "A Inspected: send Reserve 1 (blocks 8+3, last)",
    "B Reserve 1 (blocks 8+3, last): ReserveBlocks 1 (blocks 8+3, last)",
    "B BlocksReserved: send Reserved 1",
    "A Reserved 1: Drain (blocks 8+3)",
]
UNTIL_COMMIT = [
    *UNTIL_DRAIN,
    "A Drained: CopyBlocks 1 (blocks 8+2); send Commit (10 blocks)",
]
UNTIL_ADOPT = [
    *UNTIL_COMMIT,
    "B StageReceived: -",
    "B Commit (10 blocks): Adopt (10 blocks)",
]
TWO_STAGES = (inspected(9), inspected(10))

GIVEN_BACK = [
    "B Abort {0}: FreeReservation",
    "B ReservationFreed: send Aborted {0}; Ended {0}, {1} stages",
    "A Aborted {0}: -",
]


def given_back(reason: Reason, num_stages: int) -> list[str]:
    return [line.format(reason.name, num_stages) for line in GIVEN_BACK]


CLIENT = [("A", ClientAborted())]
