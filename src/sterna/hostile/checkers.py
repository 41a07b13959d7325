"""What must hold after every event, and what must hold in the end.

What clients must see is in `ledger`.
"""

from sterna.hostile.actors import FrontendProcess, InstanceProcess
from sterna.hostile.platform import Platform
from sterna.hostile.settings import ENGINE
from sterna.hostile.violations import Violation
from sterna.types import RequestId


class Checkers:
    """Looks at whatever an event has touched."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        # Where each request may be stepped.
        self._owners: dict[RequestId, str] = {}
        self._owned: dict[str, set[RequestId]] = {}

    def check(self, instance: InstanceProcess) -> None:
        """After an event of this instance.

        Raises:
            Violation: two engines may step a request, or a block was lost or given twice.
        """
        core = instance.engine.core
        steppable: set[RequestId] = set()
        num_blocks = core.num_free_blocks + core.num_reserved_blocks
        if instance.may_act:
            for request in core.requests():
                num_blocks += request.num_blocks
                if not core.is_drained(request.request_id):
                    steppable.add(request.request_id)
            if num_blocks != ENGINE.num_blocks:
                raise Violation(f"{instance.name} has {num_blocks} of {ENGINE.num_blocks} blocks")
        name = instance.name
        owned = self._owned.get(name, set())
        if steppable == owned:
            return
        for request_id in sorted(steppable - owned):
            owner = self._owners.get(request_id)
            if owner is not None and self._may_act(owner):
                raise Violation(f"{request_id} has two owners: {owner} and {name}")
            self._owners[request_id] = name
        for request_id in owned - steppable:
            if self._owners[request_id] == name:
                del self._owners[request_id]
        self._owned[name] = steppable

    def _may_act(self, name: str) -> bool:
        instance = self._platform.world.processes[name]
        return isinstance(instance, InstanceProcess) and instance.may_act


def check_rest(platform: Platform) -> None:
    """After all requests have ended, and some time.

    Raises:
        Violation: something is left of them somewhere.
    """
    for instance in platform.instances():
        core = instance.engine.core
        if not core.is_empty:
            left = sorted(each.request_id for each in core.requests())
            raise Violation(
                f"{instance.name} still has requests {left}, {core.num_reservations} reservations"
            )
        if instance.core.has_open_migrations:
            raise Violation(f"{instance.name} has a migration that has not ended")
        if left := sorted(instance.core.requests()):
            raise Violation(f"{instance.name} still answers for {left}")
        if instance.engine.streams:
            raise Violation(f"{instance.name} keeps streams that have ended")
    for process in platform.members():
        if isinstance(process, FrontendProcess) and process.core.next_deadline_s is not None:
            raise Violation(f"{process.name} still waits for something")
        if isinstance(process, FrontendProcess) and process.streams is not None:
            process.streams.check_rest()
