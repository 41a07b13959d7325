"""The workloads: families of points, each the options of one `sterna simulate`."""

from dataclasses import dataclass, fields

from bench.paper.points import paper_points
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.simulator.paper import COPY_TIME, SERVING_STEP_TIME

SCALING_STEPS = ((5, 40), (10, 80), (20, 160), (80, 480), (160, 960), (320, 1_920))
"""Bounds of the mean freeness between which auto-scaling keeps a cluster."""


def scaling_point(low_steps: float, high_steps: float) -> str:
    """The point's name."""
    return f"auto-scaling from {low_steps:g} to {high_steps:g} steps"


@dataclass(frozen=True, slots=True)
class Point:
    """One workload on one cluster.

    Attributes:
        name: unique within its family.
        options: those of `sterna simulate`, except for the policy and the seed.
        chooses: whether parameters were chosen on it, on other seeds.
        has_parts: whether single parts of Sterna's policy run on it.
        note: what else was chosen on it, for its title.
    """

    name: str
    options: tuple[str, ...]
    chooses: bool = False
    has_parts: bool = True
    note: str = ""

    @property
    def trace(self) -> str:
        """The name of its trace."""
        return self.options[self.options.index("--trace") + 1]


@dataclass(frozen=True, slots=True)
class Family:
    """Points of one kind.

    Attributes:
        name: on the command line and in the rows.
        title: in the page.
    """

    name: str
    title: str
    points: tuple[Point, ...]


def _serving_options() -> tuple[str, ...]:
    """The paper's engines, with the costs of serving."""
    parts: dict[str, StepTime | CopyTime] = {"step_time": SERVING_STEP_TIME, "copy_time": COPY_TIME}
    return tuple(
        text
        for name, part in parts.items()
        for each in fields(part)
        for text in ("--set", f"{name}.{each.name}={getattr(part, each.name)!r}")
    )


OVERLOADED = "1.5 times the sustainable rate"

_CHOOSING = ("M-M", "L-L", "ShareGPT", "S-L")
"""Traces of the paper on which parameters were chosen."""


def _paper() -> Family:
    """The paper's seven traces at their middle and top rates, as its cluster ran them, with live
    load reports."""
    rates: dict[str, list[float]] = {}
    for row in paper_points("figure11"):
        if row["policy"] == "Llumnix":
            rates.setdefault(row["trace"], []).append(row["request_rate"])
    points = []
    for trace, of_trace in rates.items():
        of_trace.sort()
        for rate in (of_trace[len(of_trace) // 2], of_trace[-1]):
            workload = ("--trace", trace, "--rate", f"{rate:g}", "--requests", "10000")
            # Runs of the parts on all points would take hours.
            has_parts = trace in ("M-M", "L-L", "S-L")
            name = f"{trace} {rate:g}/s"
            options = (*workload, *_serving_options())
            points.append(Point(name, options, trace in _CHOOSING, has_parts))
    return Family("paper", "The paper's traces", tuple(points))


def _clusters() -> Family:
    """The middle rate of one of the paper's traces, M-M, for each instance, on other clusters."""

    def point(
        name: str,
        rate: float,
        num_requests: int,
        *more: str,
        chooses: bool = False,
        has_parts: bool = False,
    ) -> Point:
        workload = ("--trace", "M-M", "--rate", f"{rate:g}", "--requests", str(num_requests))
        return Point(name, (*workload, *_serving_options(), *more), chooses, has_parts)

    scaling = [
        point(
            scaling_point(low, high),
            *(4.0, 10_000, "--auto-scaling", "1:16", "--arrivals", "gamma:4"),
            *("--scale-low", str(low), "--scale-high", str(high)),
        )
        for low, high in SCALING_STEPS
    ]
    return Family(
        "clusters",
        "Other clusters",
        (
            point("4 instances", 1.9, 4_000, "--instances", "4", chooses=True, has_parts=True),
            point("64 instances", 30.4, 20_000, "--instances", "64"),
            point("chunked prefill", 7.6, 10_000, "--engine-mode", "chunked"),
            point("loads as of the current step's begin", 7.6, 10_000, "--report", "step"),
            point(
                "a tenth of high priority", 7.6, 10_000, "--high-fraction", "0.1", has_parts=True
            ),
            point(OVERLOADED, 11.7, 5_000, chooses=True, has_parts=True),
            *scaling,
        ),
    )


def _options(
    profile: str, num_instances: int, trace: str, *more: str, caches: bool = True
) -> tuple[str, ...]:
    cluster = ["--profile", profile, "--instances", str(num_instances), "--trace", trace]
    caching = ["--set", "engine.prefix_caching=true"] if caches else []
    return (*cluster, *more, *caching)


H100, RTX4090 = "h100-llama-3.1-8b", "rtx4090-llama-3.1-8b"

COPY_START_NOTE = "`copy_start_cost` was chosen by these results, too"

PREFIXES = Family(
    "prefixes",
    "Prefixes and sessions",
    (
        Point(
            "mooncake-conversation",
            _options(H100, 16, "mooncake-conversation", "--rate", "6", "--requests", "6000"),
            chooses=True,
        ),
        Point(
            "agents",
            _options(
                RTX4090,
                8,
                "agents",
                *("--rate", "0.45", "--requests", "3000", "--divide-lengths", "16"),
            ),
            chooses=True,
        ),
        Point(
            "mooncake-conversation, full",
            _options(H100, 8, "mooncake-conversation", "--rate", "5", "--requests", "4000"),
            note=COPY_START_NOTE,
        ),
        Point(
            "agents, small caches",
            _options(
                RTX4090,
                4,
                "agents",
                *("--rate", "0.1", "--requests", "3000", "--divide-lengths", "8"),
            ),
            chooses=True,
        ),
        Point(
            "mooncake-arxiv",
            _options(H100, 8, "mooncake-arxiv", "--rate", "5.5"),
            note=COPY_START_NOTE,
        ),
        Point(
            "agentic-code",
            _options(RTX4090, 8, "agentic-code", "--rate", "0.4", "--divide-lengths", "16"),
        ),
        Point(
            "8 system prompts",
            _options(H100, 8, "prompts:8-2048-256-128", "--rate", "45", "--requests", "6000"),
        ),
        Point(
            "1 system prompt",
            _options(H100, 8, "prompts:1-2048-256-128", "--rate", "200", "--requests", "8000"),
        ),
    ),
)

SESSIONS = ("agents", "agents, small caches", "agentic-code")
"""Those whose requests are turns, almost all of them."""

REASONING_RATES = (2.5, 3, 3.5, 4)
REASONING_RATE = 3

ROLLOUTS = "512 rollouts at once"


def reasoning_point(rate: float) -> str:
    """The point's name."""
    return f"reasoning {rate:g}/s"


REASONING = Family(
    "reasoning",
    "Long outputs",
    (
        *(
            Point(
                reasoning_point(rate),
                _options(
                    H100, 16, "reasoning", "--rate", f"{rate:g}", "--requests", "2000", caches=False
                ),
                chooses=rate == REASONING_RATE,
                has_parts=rate == REASONING_RATE,
            )
            for rate in REASONING_RATES
        ),
        Point(
            ROLLOUTS,
            _options(H100, 16, "reasoning", "--rate", "100000", "--requests", "512", caches=False),
        ),
    ),
)

NUM_SEEDS = 8
"""Seeds of each policy on each point; tables and plots show these alone."""

NUM_DECIDING_SEEDS = 24
"""Seeds of the two policies that most goals compare, where `decides`."""


def decides(family: str, point: Point) -> bool:
    """Whether the goals of this point compare Sterna's policy with Llumnix's, run by run."""
    return family in ("paper", "clusters") and not point.name.startswith("auto-scaling")


FAMILIES = {each.name: each for each in (_paper(), _clusters(), PREFIXES, REASONING)}
"""All of them, by name."""
