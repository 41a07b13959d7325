"""Custom policies: classes whose methods decide in place of the built-in rules. Pure.

    class Fewest(Policy):
        base = "llumnix"

        def dispatch(self, request, instances):
            return min(instances, key=lambda each: each.num_requests).instance_id

What a class does not override, the rules of its `base` decide. `policy_file` finds such a class in
a file, for `sterna simulate` and `sterna serve` (docs/policies.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Self, get_type_hints

from sterna.config import PolicyConfig, ScalingConfig
from sterna.errors import ConfigurationError
from sterna.policy.dispatch import choose
from sterna.policy.pairing import pair
from sterna.policy.presets import preset
from sterna.policy.selection import candidates_to_move
from sterna.policy.setting_text import converted, did_you_mean
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import InstanceId, InstanceView, RequestView


@dataclass(frozen=True, slots=True)
class Round:
    """What the global scheduler knows in a round besides the instances.

    Attributes:
        kept_free: the instance whose memory is kept free for a request that waits: requests move
            there only from an instance that is being emptied.
        kv_formats: the formats of the instances' KV blocks; empty while all have the same. Between
            two formats a request moves without its KV cache.
        num_held: requests that wait at the scheduler, which no instance shows.
        held_tokens: the memory that they need to begin.
        held_s: time for which the first of them has waited; 0 without any.
    """

    kept_free: InstanceId | None = None
    kv_formats: Mapping[InstanceId, str] = field(default_factory=dict)
    num_held: int = 0
    held_tokens: int = 0
    held_s: float = 0.0


MEANT = (
    "base",
    "settings",
    "looks_at_prefixes",
    "dispatch",
    "pair",
    "victims",
    "num_instances",
)
"""Attributes of `Policy` that a class may define."""


class Policy:
    """The rules of a preset, to be overridden.

    The global scheduler has one object of the class, and each instance another; they share nothing.
    Each run of a simulation and each process of a server makes an object of its own, so that
    they may remember what they have seen. They must not change what they are given, nor look at a
    clock: the same events are to lead to the same decisions.

    Attributes:
        base: the preset whose rules decide where the class does not.
        settings: fields of `PolicyConfig` that differ from the preset's; values may also be text as
            on the command line.
        looks_at_prefixes: whether `NewRequest.cached` is to be filled in.
        config: the resulting rules, without the class, as options of the command line have changed
            them; there before `__init__`.
        this_round: what `pair` and `num_instances` may look at besides the instances.
    """

    base: str = "sterna"
    settings: Mapping[str, Any] = {}
    looks_at_prefixes: bool = False
    config: PolicyConfig
    this_round: Round = Round()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse what is meant to be a decision or a rule, and would never be asked for."""
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            _require_spelling(cls, name, value)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Here, since an `__init__` may go by it, and need not call that of its base.
        made = super().__new__(cls)
        settings = {name: _setting(cls, name, value) for name, value in cls.settings.items()}
        made.config = replace(preset(cls.base), **settings, name=cls.__name__)
        return made

    def with_fresh_state(self, config: PolicyConfig) -> Self:
        """An object that remembers nothing, with these rules where it does not decide."""
        made = self.__new__(type(self))
        made.config = config
        made.__init__()  # type: ignore[misc]
        return made

    def as_config(self) -> PolicyConfig:
        """The rules with this class.

        Raises:
            ConfigurationError: a method asks what caches have, which its requests do not say.
        """
        config = replace(self.config, own=self)
        if not config.looks_at_prefixes:
            _require_no_use_of_caches(type(self))
        return config

    @property
    def chooses_instances(self) -> bool:
        """Whether the class defines `dispatch`."""
        return type(self).dispatch is not Policy.dispatch

    @property
    def makes_pairs(self) -> bool:
        """Whether the class defines `pair`. Where it does not, the scheduler asks the rules of its
        base."""
        return type(self).pair is not Policy.pair

    @property
    def chooses_victims(self) -> bool:
        """Whether the class defines `victims`."""
        return type(self).victims is not Policy.victims

    def begin_round(self, known: Round) -> None:
        """See `OwnDecisions`."""
        self.this_round = known

    def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
        """The instance for the request, of at least one. Those that are being emptied are among
        them only while there is no other.

        With late binding (`PolicyConfig.binds_late`, which `sterna` has) the instances are those
        that have room for the request, and it waits at the scheduler, unasked about, until there is
        one. A rule that may choose a full instance needs `settings = {"binds_late": False}`.
        """
        chosen = choose(request, instances, self.config)
        assert chosen is not None
        return chosen

    def pair(self, instances: Sequence[Candidate]) -> Mapping[InstanceId, InstanceId]:
        """The destination of each instance from which requests are to move, once a round; of at
        least one."""
        known = self.this_round
        return pair(instances, self.config, known.kept_free, known.kv_formats)

    def victims(self, instance: InstanceView) -> Sequence[RequestView]:
        """The requests that may move from this instance, in the order of their moves: such without
        `immovable`. Queuing ones move only from an instance that is being emptied."""
        return candidates_to_move(instance, self.config)

    def num_instances(
        self, instances: Sequence[Candidate], num_starting: int, scaling: ScalingConfig
    ) -> int | None:
        """How many instances there should be within the bounds of auto-scaling, once a round; None:
        the built-in rules decide.

        Those that are missing are started at once; of those that are too many, the emptiest one is
        terminated, one a round. The built-in rules start one, too, where a request has waited at
        the scheduler for some time (`ScalingConfig.starved_after_s`). A number takes their place:
        requests that wait are in `this_round`, and in none of the instances.

        Args:
            instances: those that serve and are not being emptied, at least one.
            num_starting: those that come up.
        """
        return None


def _require_spelling(owner: type[Policy], name: str, value: Any) -> None:
    """Refuse a public attribute that is like one of `Policy` in name and kind, if the class leaves
    that one as it is, and does not use its own: its base would decide, and its author would not
    see it.

    Raises:
        ConfigurationError: it is.
    """
    near = get_close_matches(name, MEANT, n=1, cutoff=0.8)
    if name in MEANT or name.startswith("_") or not near:
        return
    like = getattr(Policy, near[0])
    if getattr(owner, near[0]) is not like or _kind(value) != _kind(like):
        return
    others = [each for each in vars(owner).values() if each is not value]
    if not any(isinstance(each, FunctionType) and _uses(each.__code__, name) for each in others):
        raise ConfigurationError(
            f"{owner.__name__}.{name} overrides nothing of Policy; did you mean {near[0]}? "
            "If not, give it another name"
        )


OF_CACHES = ("cached_tokens", "uncached_tokens", "uncached_pairs")
"""Methods of `NewRequest` that go by its `cached`."""


def _require_no_use_of_caches(owner: type[Policy]) -> None:
    """Refuse a class that would be told that no instance has anything of any prompt.

    Raises:
        ConfigurationError: it would.
    """
    for name, value in vars(owner).items():
        for each in OF_CACHES:
            is_its_own = hasattr(owner, each)
            if isinstance(value, FunctionType) and not is_its_own and _uses(value.__code__, each):
                raise ConfigurationError(
                    f"{owner.__name__}.{name} asks a request for its {each}, which it has only for "
                    "a class that looks at prefix caches: add looks_at_prefixes = True"
                )


def _uses(code: CodeType, name: str) -> bool:
    """Whether a function names this attribute, also in a function within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return name in code.co_names or any(_uses(each, name) for each in inner)


def _kind(value: Any) -> object:
    """The number of a method's parameters, or a value's type."""
    return value.__code__.co_argcount if isinstance(value, FunctionType) else type(value)


@cache
def _types() -> Mapping[str, Any]:
    """The types of the fields that a class may set."""
    types = get_type_hints(PolicyConfig)
    return {name: each for name, each in types.items() if name not in ("name", "own")}


def _setting(owner: type[Policy], name: str, value: Any) -> Any:
    """A value of `Policy.settings` as the field has it.

    Raises:
        ConfigurationError: there is no such field, or its type has no such value.
    """
    types, place = _types(), f"{owner.__name__}.settings"
    if name not in types:
        raise ConfigurationError(
            f"{place}: there is no setting {name!r}{did_you_mean(name, types)}"
        )
    return converted(f"{place}: {name}", value, types[name])


def gives_target_load(policy: PolicyConfig) -> bool:
    """Whether a custom class has target loads among its settings."""
    return isinstance(policy.own, Policy) and "target_load_tokens" in policy.own.settings
