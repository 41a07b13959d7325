"""Random walks through a `World`: the same moves as the stateful test, weighted so that most
walks bring their migrations into every state before a fault strikes. Deterministic by seed.
"""

from collections.abc import Sequence
from random import Random

from sterna.migration.messages import Mode
from tests.migration.engine import Where
from tests.migration.world import World

NUM_REQUESTS = 3

FAULTS = (
    "lose",
    "repeat",
    "abort",
    "preempt",
    "hint",
    "refuse",
    "transfer",
    "listening",
    "time",
    "kill",
    "confirm",
)


def walk(
    world: World, seed: int, num_moves: int = 250, faults: Sequence[str] | None = None
) -> None:
    """Play one walk, heal, and check.

    Args:
        faults: those that may happen; None: a few, chosen by the seed.

    Raises:
        AssertionError: a rule of the world was broken.
        ProtocolError: a machine was told something that is illegal.
    """
    random = Random(seed)
    # A walk with every fault at once gets nowhere: each has a few of them.
    if faults is None:
        faults = random.sample(FAULTS, random.randint(0, 4))
    fault_share = random.choice((0.02, 0.05, 0.15))
    names = list(world.nodes)
    for _ in range(NUM_REQUESTS):
        world.add_request(random.choice(names), random.randint(1, 9), random.randint(3, 30))
    for _ in range(num_moves):
        if random.random() < fault_share and faults:
            disturb(world, random, random.choice(faults))
        elif random.random() < 0.15:
            serve(world, random)
        elif moves := world.moves():
            random.choice(moves)()
        else:
            world.advance(world.now_s + random.choice((0.1, 1.0)))
        world.check()
    world.heal()


def serve(world: World, random: Random) -> None:
    """An engine makes a step, or somebody wants a request moved."""
    node = random.choice(world.alive())
    if random.random() < 0.7:
        world.step(node)
        return
    instance_id = node.engine.instance_id
    peers = [i for i, n in world.nodes.items() if i != instance_id and not n.is_death_confirmed]
    if not peers:
        return
    to = random.choice(peers)
    if random.random() < 0.3:
        world.set_destination(instance_id, random.choice((to, None)))
    elif node.engine.requests:
        request_id = random.choice(list(node.engine.requests))
        world.order(request_id, instance_id, to, random.choice((Mode.LIVE, Mode.LIVE, *Mode)))


def disturb(world: World, random: Random, fault: str) -> None:
    """Let the fault happen, where there is something that it can hit."""
    live = sorted(set(world.home) - world.ended)
    drained = [
        request.request_id
        for node in world.alive()
        for request in node.engine.requests.values()
        if request.where is Where.DRAINED
    ]
    listening = [(node, key) for node in world.alive() for key in node.engine.listening]
    running = [
        (node, request.request_id)
        for node in world.alive()
        for request in node.engine.requests.values()
        if request.where is Where.RUNNING
    ]
    unconfirmed = [
        instance_id
        for instance_id, node in world.nodes.items()
        if not node.is_alive and not node.is_death_confirmed
    ]
    match fault:
        case "lose" if world.network:
            world.network.remove(random.choice(world.network))
        case "repeat" if world.network:
            world.network.append(random.choice(world.network))
        case "abort" if live:
            # The short time around a commit is where an abort is lost most easily.
            world.abort_by_client(random.choice(drained if drained else live))
        case "preempt" | "hint" if running:
            node, request_id = random.choice(running)
            world.preempt(node, request_id, is_hinted=fault == "hint")
        case "refuse":
            random.choice(world.alive()).engine.num_adoptions_to_fail = 1
        case "transfer" if world.transfers:
            world.fail_transfer(random.choice(world.transfers))
        case "listening" if listening:
            world.fail_listening(*random.choice(listening))
        case "time":
            world.advance(world.now_s + random.choice((1.0, 6.0, 11.0)))
        case "kill" if len(world.alive()) > 1:
            world.kill(random.choice(world.alive()).engine.instance_id)
        case "confirm" if unconfirmed:
            world.confirm_death(random.choice(unconfirmed))
