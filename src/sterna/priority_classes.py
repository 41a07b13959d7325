"""Priority classes: those that clients may ask for, and their ranks. Pure.

A class has both of the paper's priorities (Section 4.4.1). The *scheduling* priority orders
requests, at the global scheduler and in the queue of an instance. The *execution* priority decides
about headroom, which limits the load beside requests of the class. Clients name a class by OpenAI's
`service_tier`, or by vLLM's `priority`, an integer that is more urgent if it is lower: that of a
class is its rank with the sign turned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sterna.errors import ConfigurationError
from sterna.types import HIGH, NORMAL, Priority

HIGH_NAME = "high"
NORMAL_NAME = "normal"

TIER_OF_HIGH = "priority"
TIER_OF_NORMAL = "default"
TIER_BELOW_NORMAL = "flex"
TIER_OF_CHOICE = "auto"
"""OpenAI's names of tiers."""


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """A class of requests.

    Attributes:
        scheduling_priority: its rank; no two classes have the same.
        execution_priority: above normal, its requests have a headroom.
        target_load_tokens: the real load of an instance up to which these requests keep their
            speed; None for the policy's. The headroom is M less this.
    """

    name: str
    scheduling_priority: Priority
    execution_priority: Priority
    target_load_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a priority class needs a name")
        target = self.target_load_tokens
        if target is None:
            return
        if target <= 0:
            raise ConfigurationError(
                f"priority class {self.name}: target_load must be positive, not {target}"
            )
        if self.execution_priority <= NORMAL:
            raise ConfigurationError(
                f"priority class {self.name}: only classes with an execution rank above normal "
                "(0) have a target_load; leave it out"
            )


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """All classes of a server.

    Attributes:
        classes: in any order; the one of rank 0 is called normal, and no other.
        are_honoured: whether requests get the class that they ask for; otherwise all are normal,
            since the policy or the engine has no priorities.
    """

    classes: tuple[PriorityClass, ...]
    are_honoured: bool = True
    _by_rank: Mapping[int, PriorityClass] = field(init=False, repr=False, compare=False)
    _by_tier: Mapping[str, PriorityClass] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_rank: dict[int, PriorityClass] = {}
        names: set[str] = set()
        for each in self.classes:
            if each.name in names:
                raise ConfigurationError(f"there are two priority classes {each.name}; rename one")
            names.add(each.name)
            other = by_rank.setdefault(each.scheduling_priority, each)
            if other is not each:
                raise ConfigurationError(
                    f"priority classes {other.name} and {each.name} have the same rank, "
                    f"{each.scheduling_priority}; give each its own"
                )
        normal = by_rank.get(NORMAL)
        if normal is None or normal.name != NORMAL_NAME or normal.execution_priority != NORMAL:
            raise ConfigurationError(
                f"the priority class of rank {NORMAL} must be there and be called {NORMAL_NAME}, "
                f"with execution rank {NORMAL}"
            )
        self._check_names(names)
        self._check_target_loads()
        object.__setattr__(self, "_by_rank", by_rank)
        object.__setattr__(self, "_by_tier", self._tiers())

    def _check_names(self, names: set[str]) -> None:
        # These have OpenAI's meaning, so that clients could not name such a class.
        for taken in (TIER_OF_NORMAL, TIER_OF_CHOICE):
            if taken in names:
                raise ConfigurationError(
                    f"no priority class can be called {taken}, a tier of the API that stands for "
                    f"{NORMAL_NAME}; rename it"
                )

    def _check_target_loads(self) -> None:
        """Refuse two target loads of one execution priority: it has one headroom."""
        first: dict[Priority, PriorityClass] = {}
        for each in self.classes:
            other = first.setdefault(each.execution_priority, each)
            if other.target_load_tokens != each.target_load_tokens:
                raise ConfigurationError(
                    f"priority classes {other.name} and {each.name} have the same execution rank, "
                    f"{each.execution_priority}, and must have the same target_load"
                )

    def _tiers(self) -> dict[str, PriorityClass]:
        """Return the class of every tier; answers name the first tier of a class."""
        ranked = sorted(self.classes, key=lambda each: each.scheduling_priority)
        by_name = {each.name: each for each in ranked}
        normal = by_name[NORMAL_NAME]
        above = [each for each in ranked if each.scheduling_priority > NORMAL]
        below = [each for each in ranked if each.scheduling_priority < NORMAL]
        high = by_name.get(TIER_OF_HIGH) or by_name.get(HIGH_NAME) or (above or [normal])[0]
        flex = by_name.get(TIER_BELOW_NORMAL) or (below or [normal])[-1]
        tiers = {
            TIER_OF_NORMAL: normal,
            TIER_OF_CHOICE: normal,
            TIER_OF_HIGH: high,
            TIER_BELOW_NORMAL: flex,
        }
        return {**tiers, **{name: each for name, each in by_name.items() if name not in tiers}}

    @property
    def normal(self) -> PriorityClass:
        """The class of requests that name none."""
        return self._by_rank[NORMAL]

    @property
    def highest(self) -> PriorityClass:
        """The most urgent class."""
        return self._by_rank[max(self._by_rank)]

    @property
    def take_policys_target_load(self) -> bool:
        """Whether a class with a headroom has no target load of its own."""
        return any(
            each.execution_priority > NORMAL and each.target_load_tokens is None
            for each in self.classes
        )

    @property
    def tiers(self) -> tuple[str, ...]:
        """The possible values of `service_tier`."""
        return tuple(self._by_tier)

    def named(self, name: str) -> PriorityClass | None:
        """Return the class of this name, if there is one."""
        return next((each for each in self.classes if each.name == name), None)

    def of_tier(self, tier: str) -> PriorityClass | None:
        """Return the class that a `service_tier` stands for; None if there is no such tier.

        `priority` is the class high, or the next above normal; `flex` is the class flex, or the
        next below normal; without such a class they are normal, as in OpenAI's own service. The
        tier of every other class is its name.
        """
        return self._by_tier.get(tier)

    def tier_of(self, used: PriorityClass) -> str:
        """Return the tier that is named in answers to requests of this class."""
        return next(tier for tier, each in self._by_tier.items() if each == used)

    def of_vllm_priority(self, vllm_priority: int) -> PriorityClass:
        """Return the class that vLLM's integer stands for: that of the rank -`vllm_priority`, or
        of the nearest rank; of two, the less urgent one."""
        exact = self._by_rank.get(-vllm_priority)
        if exact is not None:
            return exact
        return self._by_rank[min(self._by_rank, key=lambda rank: (abs(rank + vllm_priority), rank))]

    def admitted(self, asked: PriorityClass, highest: PriorityClass | None) -> PriorityClass:
        """Return the class that a request gets: the one that it asks for, or `highest` if that is
        lower."""
        if not self.are_honoured:
            return self.normal
        if highest is not None and asked.scheduling_priority > highest.scheduling_priority:
            return highest
        return asked

    def target_load_tokens(self, default_tokens: int) -> dict[Priority, int]:
        """Return the target load of each execution priority that has a headroom.

        Args:
            default_tokens: that of classes without one.
        """
        return {
            each.execution_priority: (
                default_tokens if each.target_load_tokens is None else each.target_load_tokens
            )
            for each in self.classes
            if each.execution_priority > NORMAL
        }


DEFAULT_CLASSES = PriorityClasses(
    (PriorityClass(HIGH_NAME, HIGH, HIGH), PriorityClass(NORMAL_NAME, NORMAL, NORMAL))
)
"""The paper's two classes (Section 6.4)."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of the API, and the rights of its owner.

    Attributes:
        name: a name for people; not the key.
        digest: SHA-256 of the key, which is not stored.
        highest: the highest class that its requests get; None for any.
        is_admin: whether it opens the operators' API.
    """

    name: str
    digest: bytes
    highest: PriorityClass | None = None
    is_admin: bool = False
