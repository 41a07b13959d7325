"""Fleets that serve, and what is to be seen of them."""

from sterna.supervisor.fleet import Close, Fleet, FleetEffect, Phase, Start
from sterna.types import InstanceId

I0, I1, I2, I3 = (InstanceId(f"i{k}") for k in range(4))


def started(effects: list[FleetEffect]) -> list[InstanceId]:
    return [each.instance_id for each in effects if isinstance(each, Start)]


def closed(effects: list[FleetEffect]) -> list[InstanceId]:
    return [each.instance_id for each in effects if isinstance(each, Close)]


def serving(wanted: int = 2, **options: int) -> Fleet:
    """A fleet whose first instances are up."""
    fleet = Fleet(wanted, **options)
    for instance_id in started(fleet.begin(0.0)):
        fleet.on_started(instance_id, 1.0)
    return fleet


def phases(fleet: Fleet) -> dict[InstanceId, Phase]:
    return {each: member.phase for each, member in fleet.members.items()}
