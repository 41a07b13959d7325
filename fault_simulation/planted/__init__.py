"""Mistakes planted on purpose, to show that the simulator finds them.

Some are mistakes of earlier implementations of the paper; the others leave out one step of our own
arguments. Each replaces a class whose code decides; production code knows nothing of them.

Offers: nothing.
Imports: config, engine, errors, fault_simulation.adversary, fault_simulation.engine,
    fault_simulation.oracle, fault_simulation.processes, frontend.requests, frontend.resumable,
    instance, messages, messaging, migration, migration.messages, scheduler, supervisor, types.
"""

from dataclasses import dataclass, field

from fault_simulation.adversary.faults import LOST_VERDICTS, REFUSED_ACKS, FaultPlan
from fault_simulation.engine.engine import SimulatedEngine
from fault_simulation.planted.caches import (
    AdoptsWhatIsBehind,
    CachesWhatIsBehind,
    CopiesNotAllGroups,
    FindsColumnsByThePresent,
    ForgetsTheLength,
    LeaksWhatIsBehind,
    LeavesNoUnitForTheState,
    SendsStateFirst,
    SendsTheBlocksOfThePlan,
    WritesToWhatIsFreed,
)
from fault_simulation.planted.fleets import (
    AcknowledgesOnce,
    LeavesWhatWasClosing,
    ReportsItsEndOnce,
    StartsNothingAgain,
)
from fault_simulation.planted.frontends import (
    AcknowledgesTooSoon,
    AsksOnceForOwners,
    BeginsAnew,
    BelievesOldEmptyings,
    DeliversOutOfOrder,
    DeliversRepeats,
    DropsWhatIsUnsent,
    HandsBeforeItIsKept,
    HoldsFirstDeathsAgainst,
    JudgesAllSuspects,
    JudgesByOthersDeaths,
    NeverClearsSuspects,
    NeverStopsTheUnawaited,
    SendsSuspectsAgain,
    SendsToTerminating,
    TakesNothingBack,
    TakesNothingOver,
    TakesSilenceForDenials,
    TellsOfNewStreamsOnly,
    TrustsTheHolder,
    WaitsForLostTokens,
    WaitsForTheScheduler,
)
from fault_simulation.planted.instances import (
    AcceptsOldAcks,
    DoesNotWait,
    ExtendsWhatEnds,
    ForgetsThePredecessor,
    ForgetsUnknownFrontends,
    FreesFirst,
    LosesState,
    NeverEnds,
    NeverFreesReservations,
    NeverReleases,
    NeverResumes,
    PartsInSilence,
    SaysEmptiedTooSoon,
    SaysNothingAgain,
    StepsForTheDead,
    StepsWhatItWasToldToEnd,
    TellsPresenceOnly,
)
from fault_simulation.planted.mailboxes import (
    AsksOnceForAGap,
    ConfirmsNothing,
    ConfirmsTooFar,
    HandsRepeatsOver,
    IsContentWithAPart,
    KeepsForgottenChannels,
    NeverAsksForGaps,
    NeverProbes,
    TakesWhatIsAhead,
)
from fault_simulation.planted.migrations import (
    AdoptsAfterItSaidAborted,
    AdoptsBeforeTheLastBlocks,
    DoesNotAwaitDrains,
    ForgetsThatItAdopted,
    HasNoLease,
    LooksWhileASlotIsFree,
    NeverAsksForTheVerdict,
    ResumesOnTimeOut,
    TellsOfALastStage,
)
from fault_simulation.planted.prefixes import (
    EntersPrefixesUnderOtherKeys,
    KeepsAbortedPrefixes,
    RemembersTheDead,
    ReportsEverythingOnce,
    ReportsNoEviction,
    ReportsNothingAdopted,
)
from fault_simulation.planted.waits import (
    AwaitsGivenUpCopies,
    AwaitsPrefixesForEver,
    ExpectsAWaitBehindEachCopy,
    LooksOnlyAtNewOnes,
)
from fault_simulation.processes.world import Cores
from sterna.instance.core import InstanceCore


@dataclass(frozen=True, slots=True)
class Mistake:
    """A planted mistake.

    Attributes:
        name: what is wrong, in words.
        plan: the faults that show it.
    """

    name: str
    cores: Cores
    plan: FaultPlan = field(default_factory=FaultPlan)


def _on_instances(name: str, core: type[InstanceCore]) -> Mistake:
    return Mistake(name, Cores(instance=core))


def _of_engines(name: str, engine: type[SimulatedEngine]) -> Mistake:
    return Mistake(name, Cores(engine=engine))


MISTAKES = (
    _on_instances("source blocks freed before the last stage was sent", FreesFirst),
    _on_instances("reservations of aborted migrations not freed", NeverFreesReservations),
    _on_instances("an abort in the last stage does not put the request back", NeverResumes),
    _on_instances("the source keeps its copy after the verdict", NeverReleases),
    _on_instances("the source resumes because nothing was heard", ResumesOnTimeOut),
    _on_instances("the source does not wait for a drain under way", DoesNotAwaitDrains),
    _on_instances("a lost verdict is not asked for again", NeverAsksForTheVerdict),
    _on_instances("the destination forgets that it adopted", ForgetsThatItAdopted),
    _on_instances("the destination adopts before the last blocks came", AdoptsBeforeTheLastBlocks),
    _on_instances("the destination adopts after it said aborted", AdoptsAfterItSaidAborted),
    _on_instances("the destination tells of a last stage that it was copied", TellsOfALastStage),
    _on_instances("the destination has no lease", HasNoLease),
    _on_instances("the instance does not wait for final acknowledgements", SaysEmptiedTooSoon),
    _on_instances("requests of a dead front end are not ended", StepsForTheDead),
    _on_instances("the instance steps what it was told to end", StepsWhatItWasToldToEnd),
    _on_instances(
        "the instance looks for more to move while a slot is free", LooksWhileASlotIsFree
    ),
    _on_instances("the instance ends what it should hand back", PartsInSilence),
    _on_instances("what is for unknown front ends is dropped", ForgetsUnknownFrontends),
    _on_instances("what was refused is not told again", SaysNothingAgain),
    Mistake("the engine does not tell of preemptions", Cores(engine=TellsPresenceOnly)),
    Mistake("state of the request does not move along", Cores(engine=LosesState)),
    Mistake("a stream waits for a scheduler that died", Cores(frontend=WaitsForTheScheduler)),
    Mistake(
        "a stream waits for a scheduler that held it and died", Cores(frontend=TrustsTheHolder)
    ),
    Mistake("the front end does not cut repeats", Cores(frontend=DeliversRepeats), LOST_VERDICTS),
    Mistake("the front end does not wait for missing tokens", Cores(frontend=DeliversOutOfOrder)),
    Mistake("the front end asks only once who has a request", Cores(frontend=AsksOnceForOwners)),
    Mistake("the front end takes silence for denials", Cores(frontend=TakesSilenceForDenials)),
    Mistake(
        "the instance accepts a final acknowledgement that came too soon",
        Cores(instance=AcceptsOldAcks, frontend=AcknowledgesTooSoon),
    ),
    Mistake("the front end does not take back what it is handed", Cores(frontend=TakesNothingBack)),
    Mistake("the front end sends to a terminating instance", Cores(frontend=SendsToTerminating)),
    Mistake(
        "the front end does not stop what no client waits for",
        Cores(frontend=NeverStopsTheUnawaited),
    ),
    Mistake("progress does not clear a suspect", Cores(frontend=NeverClearsSuspects)),
    Mistake("a request is judged by the first death", Cores(frontend=HoldsFirstDeathsAgainst)),
    Mistake("a suspect is judged by a death elsewhere", Cores(frontend=JudgesByOthersDeaths)),
    Mistake("all suspects of a second death are judged guilty", Cores(frontend=JudgesAllSuspects)),
    Mistake("suspects are sent again at a death elsewhere", Cores(frontend=SendsSuspectsAgain)),
    Mistake("outputs are handed before the buddy has them", Cores(pacing=HandsBeforeItIsKept)),
    Mistake("a new buddy is told of new streams only", Cores(pacing=TellsOfNewStreamsOnly)),
    Mistake("a stream that is taken over begins anew", Cores(pacing=BeginsAnew)),
    Mistake("the buddy takes nothing over", Cores(replicas=TakesNothingOver)),
    Mistake("the supervisor believes an old emptying", Cores(supervisor=BelievesOldEmptyings)),
    Mistake("a silent instance is given up and not killed", Cores(is_fenced=False)),
    Mistake("the instance does not end when its lease does", Cores(held_lease=NeverEnds)),
    Mistake("the supervisor does not wait for a lease", Cores(granted_leases=DoesNotWait)),
    Mistake("the supervisor extends what is to end", Cores(granted_leases=ExtendsWhatEnds)),
    Mistake(
        "a successor does not wait for leases that its predecessor gave",
        Cores(granted_leases=ForgetsThePredecessor),
    ),
    Mistake("the front end waits for tokens that were lost", Cores(frontend=WaitsForLostTokens)),
    Mistake("the front end forgets what could not be sent", Cores(frontend=DropsWhatIsUnsent)),
    Mistake(
        "the front end acknowledges an emptying only once",
        Cores(frontend=AcknowledgesOnce),
        REFUSED_ACKS,
    ),
    _on_instances("the instance reports only once that it is empty", ReportsItsEndOnce),
    Mistake("a successor does not end what was closing", Cores(supervisor=LeavesWhatWasClosing)),
    Mistake("the supervisor tries no failed start again", Cores(supervisor=StartsNothingAgain)),
    Mistake("a sender does not ask what has arrived", Cores(mailbox=NeverProbes)),
    Mistake("a receipt for a part ends the questions", Cores(mailbox=IsContentWithAPart)),
    Mistake("a receipt confirms what is missing", Cores(mailbox=ConfirmsTooFar)),
    Mistake("a receiver does not ask for what is missing", Cores(mailbox=NeverAsksForGaps)),
    Mistake("a receiver asks for what is missing only once", Cores(mailbox=AsksOnceForAGap)),
    Mistake("a receiver confirms nothing", Cores(mailbox=ConfirmsNothing)),
    Mistake("repeated messages are handed over", Cores(mailbox=HandsRepeatsOver)),
    Mistake("a message behind a gap is handed over", Cores(mailbox=TakesWhatIsAhead)),
    Mistake("a late receipt of a forgotten peer is taken", Cores(mailbox=KeepsForgottenChannels)),
    _of_engines("a page behind the window is adopted", AdoptsWhatIsBehind),
    _of_engines("a KV cache group is not copied", CopiesNotAllGroups),
    _of_engines("the state is sent before the last stage", SendsStateFirst),
    _of_engines("a block that a window has left enters the prefix cache", CachesWhatIsBehind),
    _of_engines("no unit is left for the state", LeavesNoUnitForTheState),
    _of_engines("blocks behind the window are not freed at the adoption", LeaksWhatIsBehind),
    _of_engines(
        "the source finds a stage's columns by its present length", FindsColumnsByThePresent
    ),
    _of_engines("the last stage sends the blocks of its plan", SendsTheBlocksOfThePlan),
    _of_engines("a stage is written after its reservation was freed", WritesToWhatIsFreed),
    _on_instances("the destination does not know the length at the plan", ForgetsTheLength),
    _on_instances("a new scheduler does not get the whole prefix cache", ReportsEverythingOnce),
    _on_instances("evictions from the prefix cache are not reported", ReportsNoEviction),
    _of_engines("adopted blocks in the prefix cache are not reported", ReportsNothingAdopted),
    Mistake(
        "the scheduler remembers the prefix cache of the dead", Cores(scheduler=RemembersTheDead)
    ),
    _of_engines("a copied prefix is entered one block off", EntersPrefixesUnderOtherKeys),
    _on_instances("a prefix whose copy was given up stays held", KeepsAbortedPrefixes),
    Mistake(
        "the scheduler looks at what it holds when another request comes",
        Cores(scheduler=LooksOnlyAtNewOnes),
    ),
    Mistake(
        "a request that waits for its prefix is never back in line",
        Cores(scheduler=AwaitsPrefixesForEver),
    ),
    Mistake(
        "a request waits for a copy of its prefix that was given up",
        Cores(scheduler=AwaitsGivenUpCopies),
    ),
    Mistake(
        "the scheduler expects a request behind each copy of a prefix",
        Cores(scheduler=ExpectsAWaitBehindEachCopy),
    ),
)
"""All of them."""
