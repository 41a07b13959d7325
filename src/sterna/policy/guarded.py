"""A custom policy class in a server: where it fails, the rules of its base decide. Pure.

In a simulation an exception of the class ends the run, so that its author sees it. In a server it
would end the scheduler or an instance, and the same request most likely their successors too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self, TypeVar

from sterna.config import OwnDecisions, PolicyConfig, ScalingConfig
from sterna.policy.own import Policy, Round
from sterna.policy.pairing import checked_pairs
from sterna.policy.scaling import checked_number
from sterna.policy.selection import checked_victims
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import InstanceId, InstanceView, RequestView

T = TypeVar("T")

Report = Callable[[str, Exception], None]
"""Gets the method that failed, and its exception."""


def guarded(policy: PolicyConfig, report: Report) -> PolicyConfig:
    """The same policy; a custom class in it cannot end the process."""
    if policy.own is None:
        return policy
    return replace(policy, own=GuardedPolicy(policy.own, replace(policy, own=None), report))


class GuardedPolicy:
    """The decisions of a class, where they can be carried out.

    Args:
        base: the rules that decide in its place.
    """

    def __init__(self, own: OwnDecisions, base: PolicyConfig, report: Report) -> None:
        self._own = own
        self._base = Policy()
        self._base.config = base
        self._report = report
        self.looks_at_prefixes = own.looks_at_prefixes
        self.chooses_instances = own.chooses_instances
        self.makes_pairs = own.makes_pairs
        self.chooses_victims = own.chooses_victims

    def with_fresh_state(self, config: PolicyConfig) -> Self:
        """See `OwnDecisions`."""
        return type(self)(self._own.with_fresh_state(config), config, self._report)

    def begin_round(self, known: Round) -> None:
        """See `OwnDecisions`."""
        self._base.begin_round(known)
        self._decided("begin_round", lambda: self._own.begin_round(known), lambda: None)

    def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
        """See `Policy`."""

        def decide() -> InstanceId:
            chosen: InstanceId = self._own.dispatch(request, instances)
            if all(each.instance_id != chosen for each in instances):
                raise ValueError(f"{chosen!r} is not the instance_id of an instance that was given")
            return chosen

        return self._decided("dispatch", decide, lambda: self._base.dispatch(request, instances))

    def pair(self, instances: Sequence[Candidate]) -> Mapping[InstanceId, InstanceId]:
        """See `Policy`."""

        def decide() -> Mapping[InstanceId, InstanceId]:
            return checked_pairs(self._own.pair(instances), instances)

        return self._decided("pair", decide, lambda: self._base.pair(instances))

    def victims(self, instance: InstanceView) -> Sequence[RequestView]:
        """See `Policy`."""

        def decide() -> Sequence[RequestView]:
            return checked_victims(self._own.victims(instance), instance)

        return self._decided("victims", decide, lambda: self._base.victims(instance))

    def num_instances(
        self, instances: Sequence[Candidate], num_starting: int, scaling: ScalingConfig
    ) -> int | None:
        """See `Policy`."""

        def decide() -> int | None:
            return checked_number(self._own.num_instances(instances, num_starting, scaling))

        return self._decided("num_instances", decide, lambda: None)

    def _decided(self, method: str, decide: Callable[[], T], otherwise: Callable[[], T]) -> T:
        try:
            return decide()
        except Exception as error:
            self._report(method, error)
            return otherwise()
