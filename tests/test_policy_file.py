"""A custom policy class, from a file to each decision."""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.serve.serve_options import cluster_config
from sterna.config import (
    LlmD,
    LlumletConfig,
    PolicyConfig,
    QueueDemand,
    ScalingConfig,
    Soonest,
    Victim,
)
from sterna.errors import ConfigurationError
from sterna.instance.llumlet import Llumlet
from sterna.policy.own import Policy
from sterna.policy.pairing import pair
from sterna.policy.presets import LLUMNIX, STERNA
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.policy.selection import candidates_to_move
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.policy_file import in_server, policy_named
from sterna.scheduler.global_scheduler import GlobalScheduler, SetDestination
from sterna.types import HIGH, InstanceId
from tests.policy.builders import M, evenly_loaded, instance, queuing, report, running
from tests.scheduler.test_global_scheduler import ask, places

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"

SOURCE = """
from dataclasses import dataclass, field

from sterna.policy.own import Policy

class Largest(Policy):
    base = "infaas++"
    settings = {"round_interval_s": 0.5}

    def __init__(self):
        super().__init__()
        self.num_seen = 0

    def dispatch(self, request, instances):
        self.num_seen += 1
        return max(each.instance_id for each in instances)

class Wrong(Policy):
    def dispatch(self, request, instances):
        return "i9"

class Raises(Policy):
    def __init__(self):
        raise RuntimeError("no coffee")

@dataclass
class Fields(Policy):
    base = "llumnix"
    slack: int = 3
    seen: list = field(default_factory=list)

class Derived(Policy):
    base = "llumnix"

    def __init__(self):
        self.limit = 2 * self.config.source_freeness_steps

unrelated = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def scheduler(policy: Any, *views: Any, scaling: ScalingConfig | None = None) -> GlobalScheduler:
    core = GlobalScheduler(policy, now_s=0.0, scaling=scaling)
    for view in views:
        core.on_load(report(view, policy), 0.0)
    return core


# ----------------------------------------------------------------------------------- the file


def test_a_class_in_a_file_is_a_policy(file: Path) -> None:
    policy = policy_named(f"{file}:Largest")
    assert (policy.name, policy.migrates, policy.round_interval_s) == ("Largest", False, 0.5)
    core = scheduler(policy, instance("i0"), evenly_loaded("i1", 960, 3))
    assert places(core.on_request(ask("r"), 0.0)) == [("r", "i1")]


def test_a_presets_name_is_that_preset() -> None:
    assert policy_named("llumnix") == LLUMNIX


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llumnx", "policy must be one of"),
        ("{file}", "FILE.py:CLASS"),
        ("{file}:", "FILE.py:CLASS"),
        ("{file}:Missing", "has no class Missing that is derived from sterna.policy.own.Policy"),
        ("{file}:unrelated", "has no class unrelated"),
        ("{file}:Raises", "RuntimeError: no coffee"),
        ("{folder}/nowhere.py:Largest", "cannot be read"),
        ("{folder}/broken.py:Largest", "SyntaxError"),
    ],
)
def test_what_is_no_policy_is_refused_with_a_reason(file: Path, name: str, message: str) -> None:
    (file.parent / "broken.py").write_text("class Largest(:")
    with pytest.raises(ConfigurationError) as refused:
        policy_named(name.format(file=file, folder=file.parent))
    assert message in str(refused.value)


def with_settings(folder: Path, settings: str) -> PolicyConfig:
    path = folder / "sets.py"
    path.write_text(
        "from sterna.config import LlmD, Victim\n"
        "from sterna.policy.own import Policy\n"
        f"class Sets(Policy):\n    settings = {settings}\n"
    )
    return policy_named(f"{path}:Sets")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ('{"victim": "longest"}', {"victim": Victim.LONGEST}),
        ('{"victim": Victim.LONGEST}', {"victim": Victim.LONGEST}),
        ('{"dispatch": "soonest"}', {"dispatch": Soonest()}),
        ('{"dispatch": LlmD(min_share=0.5)}', {"dispatch": LlmD(min_share=0.5)}),
        ('{"queue_demand": "all"}', {"queue_demand": QueueDemand.ALL}),
        ('{"migrates": "False"}', {"migrates": False}),
        ('{"balance_ratio": "none"}', {"balance_ratio": None}),
        ('{"round_interval_s": 1}', {"round_interval_s": 1.0}),
        ('{"target_load_tokens": "1:800"}', {"target_load_tokens": {HIGH: 800}}),
        ('{"target_load_tokens": {}}', {"target_load_tokens": {}}),
    ],
)
def test_settings_may_be_text_as_on_the_command_line(
    tmp_path: Path, settings: str, expected: dict[str, Any]
) -> None:
    policy = with_settings(tmp_path, settings)
    assert replace(policy, own=None) == replace(STERNA, name="Sets", **expected)
    # The rules of the base go by them, in a server too.
    view = instance("i0", running=[running("short", 32)], is_terminating=True)
    assert len(candidates_to_move(view, in_server(policy))) == 1
    core = scheduler(in_server(policy), instance("i0"))
    assert places(core.on_request(ask("r"), 0.0)) == [("r", "i0")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"victim": "longst"}', "Sets.settings: victim must be shortest or longest or"),
        ('{"victim": None}', "Sets.settings: victim must be shortest or longest or"),
        ('{"dispatch": Victim.LONGEST}', "Sets.settings: dispatch must be freest or"),
        ('{"concurrency": 2}', "Sets.settings: there is no setting 'concurrency'"),
        ('{"victm": 2}', "Sets.settings: there is no setting 'victm'; did you mean victim?"),
        ('{"name": "Mine"}', "Sets.settings: there is no setting 'name'"),
        ('{"growth_steps": "many"}', "Sets.settings: growth_steps must be a number, not 'many'"),
        ('{"num_session_copies": 2.5}', "num_session_copies must be a whole number, not '2.5'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_class_and_field(
    tmp_path: Path, settings: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        with_settings(tmp_path, settings)
    assert message in str(refused.value)


def asks_what_is_cached(self: Policy, request: NewRequest, instances: Sequence[Candidate]) -> str:
    return max(each.instance_id for each in instances if request.cached_tokens(each.instance_id))


@pytest.mark.parametrize(
    ("attributes", "is_refused"),
    [
        ({"base": "llumnix", "dispatch": asks_what_is_cached}, True),
        ({"base": "sterna", "dispatch": asks_what_is_cached}, False),
        (
            {"base": "llumnix", "dispatch": asks_what_is_cached, "looks_at_prefixes": True},
            False,
        ),
        ({"base": "llumnix", "dispatch": asks_what_is_cached, "cached_tokens": 7}, False),
    ],
)
def test_a_class_that_asks_for_caches_says_that_it_looks_at_them(
    attributes: dict[str, Any], is_refused: bool
) -> None:
    mine = type("Mine", (Policy,), attributes)()
    if not is_refused:
        mine.as_config()
        return
    message = "Mine.dispatch asks a request for its cached_tokens.* add looks_at_prefixes = True"
    with pytest.raises(ConfigurationError, match=message):
        mine.as_config()


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("dispach", lambda self, request, instances: "i0", "dispatch"),
        ("victim", lambda self, instance: (), "victims"),
        ("num_instance", lambda self, instances, num_starting, scaling: 1, "num_instances"),
        ("look_at_prefixes", True, "looks_at_prefixes"),
        ("setting", {"migrates": False}, "settings"),
    ],
)
def test_a_misspelt_name_is_refused_since_the_base_would_decide(
    name: str, value: Any, near: str
) -> None:
    message = f"Mine.{name} overrides nothing of Policy; did you mean {near}? If not, give it"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        type("Mine", (Policy,), {name: value})


def test_a_class_may_have_names_of_its_own() -> None:
    """Also such as are like those of a policy, if they are something else, or it has these, too."""
    type("Mine", (Policy,), {"pairs": 0, "dispatched": lambda self, request: None})
    both = {"victim": lambda self, instance: None, "victims": lambda self, instance: ()}
    type("Mine", (type("Other", (Policy,), both),), {"victim": both["victim"]})


def test_a_class_may_have_helpers_with_names_like_those_of_a_policy() -> None:
    """Such that begin with _, or that another of its functions uses."""

    def pair(self: Any, instances: Any) -> Any:
        return self._pair([each for each in instances if (lambda: self.victim(each))()])

    helpers: dict[str, Any] = {
        "_base": "x",
        "_pair": lambda self, instances: {},
        "_victims": lambda self, instance: (),
        "victim": lambda self, instance: None,
    }
    type("Mine", (Policy,), {"pair": pair, **helpers})


def test_the_file_is_not_needed_where_the_policy_travels_to(file: Path, tmp_path: Path) -> None:
    """As Ray hands it to a process on another node."""
    code = """
import sys, cloudpickle
from sterna.policy_file import policy_named
if sys.argv[1] == "send":
    open(sys.argv[2], "wb").write(cloudpickle.dumps(policy_named(sys.argv[3])))
else:
    policy = cloudpickle.load(open(sys.argv[2], "rb"))
    print(type(policy.own).__name__, policy.round_interval_s, policy.own.num_seen)
"""
    sent = tmp_path / "sent"

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    run("send", str(sent), f"{file}:Largest")
    file.unlink()
    assert run("get", str(sent)).split() == ["Largest", "0.5", "0"]


def test_a_simulation_says_which_pair_cannot_be() -> None:
    class Alone(Policy):
        def pair(self, instances: Any) -> Any:
            return {each.instance_id: each.instance_id for each in instances}

    with pytest.raises(ConfigurationError, match="'i0' cannot be its own destination"):
        scheduler(Alone().as_config(), instance("i0")).on_tick(10.0)


def test_in_a_server_a_class_that_fails_ends_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its base decides; the log says so once in a while, and where it failed."""
    policy = policy_named(f"{file}:Wrong")
    with pytest.raises(ConfigurationError, match="must return the instance_id"):
        scheduler(policy, instance("i0")).on_request(ask("r"), 0.0)
    core = scheduler(in_server(policy), instance("i0"))
    for name in ("r", "s"):
        assert places(core.on_request(ask(name), 0.0)) == [(name, "i0")]
    (record,) = caplog.records
    assert "policy failed" in record.message
    assert "method=dispatch" in record.message
    assert record.exc_info is not None
    assert in_server(LLUMNIX) is LLUMNIX


def test_in_a_server_a_round_that_a_class_cannot_begin_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Busy(Policy):
        def begin_round(self, known: Any) -> None:
            raise TypeError

    core = scheduler(in_server(Busy().as_config()), instance("i0"))
    core.on_tick(10.0)
    assert places(core.on_request(ask("r"), 10.0)) == [("r", "i0")]
    assert "method=begin_round" in caplog.text


# ------------------------------------------------------------------------------ the decisions


class Opposite(Policy):
    """Decides everything by itself, and each time unlike the built-in rules."""

    base = "llumnix"

    def pair(self, instances: Sequence[Candidate]) -> dict[InstanceId, InstanceId]:
        pairs = pair(instances, self.config)
        return {destination: source for source, destination in pairs.items()}

    def victims(self, instance: Any) -> Any:
        return candidates_to_move(instance, self.config)[::-1]

    def num_instances(
        self, instances: Sequence[Candidate], num_starting: int, scaling: ScalingConfig
    ) -> int:
        return 2 if len(instances) != 2 else 5


FULL = evenly_loaded("i0", M - 16, 4)


def test_a_class_without_methods_decides_as_its_base() -> None:
    class Same(Policy):
        base = "llumnix"

    for policy in (LLUMNIX, Same().as_config()):
        core = scheduler(policy, FULL, instance("i1"))
        assert places(core.on_request(ask("r"), 0.0)) == [("r", "i1")]
        core.on_tick(0.2)
        assert core.destinations == {"i0": "i1"}


def test_pairs_are_those_of_the_class() -> None:
    core = scheduler(Opposite().as_config(), FULL, instance("i1"))
    core.on_tick(0.2)
    assert core.destinations == {"i1": "i0"}


def test_the_order_of_moves_is_that_of_the_class() -> None:
    view = instance("i0", running=[running("short", 32), running("long", 320)])
    policy = Opposite().as_config()
    assert [each.request_id for each in candidates_to_move(view, policy)] == ["long", "short"]
    assert report(view, policy).move_tokens == 320


def test_the_number_of_instances_is_that_of_the_class_within_the_bounds() -> None:
    """By hand: of one instance, two are to be there; of two, five, and four at most may be; of
    three, two."""
    scaling = ScalingConfig(min_instances=1, max_instances=4)
    for num_instances, expected in ((1, [ScaleUp(1)]), (2, [ScaleUp(2)]), (3, [Terminate])):
        views = [instance(f"i{number}") for number in range(num_instances)]
        core = scheduler(Opposite().as_config(), *views, scaling=scaling)
        decided = [each for each in core.on_tick(0.2) if isinstance(each, ScaleUp | Terminate)]
        assert [type(each) if isinstance(each, Terminate) else each for each in decided] == expected


def test_without_an_instance_there_is_nothing_to_decide() -> None:
    """As each time that a server starts; nor is there a number of instances to go by where all that
    are there are being emptied."""

    class Least(Policy):
        def pair(self, instances: Sequence[Candidate]) -> dict[InstanceId, InstanceId]:
            assert min(each.freeness for each in instances) == -math.inf
            return {}

        def num_instances(
            self, instances: Sequence[Candidate], num_starting: int, scaling: ScalingConfig
        ) -> int:
            return len(instances) + (min(each.freeness for each in instances) < 0)

    core = scheduler(Least().as_config(), scaling=ScalingConfig())
    assert core.on_tick(10.0) == []
    core.on_load(report(instance("i0", is_terminating=True)), 10.0)
    assert [each for each in core.on_tick(20.0) if not isinstance(each, SetDestination)] == []


def test_an_instance_that_it_was_not_given_is_refused(file: Path) -> None:
    core = scheduler(policy_named(f"{file}:Wrong"), instance("i0"))
    with pytest.raises(ConfigurationError, match=r"Wrong.dispatch must return .* not 'i9'"):
        core.on_request(ask("r"), 0.0)


def test_scheduler_and_instances_share_no_object(file: Path) -> None:
    policy = policy_named(f"{file}:Largest")
    core, other = scheduler(policy, instance("i0")), scheduler(policy, instance("i0"))
    core.on_request(ask("r"), 0.0)
    owns = [policy.own, core._policy.own, other._policy.own]
    assert [each.num_seen for each in owns] == [0, 1, 0]  # type: ignore[union-attr]
    llumlet = Llumlet(InstanceId("i0"), LlumletConfig(policy=policy))
    assert llumlet._config.policy.own is not policy.own


def test_options_of_the_command_line_reach_the_rules_beneath_the_class(file: Path) -> None:
    policy = replace(policy_named(f"{file}:Largest"), source_freeness_steps=7.0).with_fresh_state()
    own: Any = policy.own
    assert own.config.source_freeness_steps == 7.0
    assert own.config.own is None


def test_a_class_may_be_a_dataclass(file: Path) -> None:
    policy = policy_named(f"{file}:Fields")
    core, other = scheduler(policy, instance("i0")), scheduler(policy, instance("i0"))
    first: Any = core._policy.own
    second: Any = other._policy.own
    assert (first.slack, first.config.name) == (3, "Fields")
    first.seen.append("r")
    assert second.seen == []
    assert places(core.on_request(ask("r"), 0.0)) == [("r", "i0")]


@pytest.mark.parametrize("in_place", [lambda policy: policy, in_server])
def test_a_constructor_goes_by_the_rules_with_their_options(file: Path, in_place: Any) -> None:
    """It need not call the one of its base."""
    policy = policy_named(f"{file}:Derived")
    default: Any = policy.own
    assert default.limit == 2 * LLUMNIX.source_freeness_steps
    made: Any = in_place(replace(policy, source_freeness_steps=7.0)).with_fresh_state().own
    assert getattr(made, "_own", made).limit == 14.0


# ------------------------------------------------------------------------------------ the page


def example(folder: Path) -> Path:
    source, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    path = folder / "nearest_prefix.py"
    path.write_text(source)
    return path


def test_the_pages_example_is_short_and_simulates(tmp_path: Path) -> None:
    path = example(tmp_path)
    assert len(path.read_text().splitlines()) <= 20
    text = PAGE.read_text("utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^ {4}sterna (simulate .*NearestPrefix)$", text, re.MULTILINE)
    command = [
        *(str(Path(sys.executable).with_name("sterna")), *shlex.split(line)),
        *("nearest_prefix.py:NearestPrefix:migrates=false", "--json"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=path.parent)
    found = json.loads(done.stdout)
    blind, nearest, bound = found[0], found[3], found[6]
    assert nearest["prefix_reuse"] > blind["prefix_reuse"]
    assert nearest["settings"]["policy"]["own"] == "NearestPrefix"
    assert bound["settings"]["policy"]["migrates"] is False


def test_the_pages_example_empties_an_instance(tmp_path: Path) -> None:
    """The request that queues leaves first, also where all batches are full: it needs no place."""
    policy = policy_named(f"{example(tmp_path)}:NearestPrefix")
    view = instance(
        "i0",
        running=[running("long", 320, num_output_tokens=64), running("short", 32)],
        queuing=[queuing("new", 160)],
    )
    full = replace(evenly_loaded("i1", 800, 4), num_slots=4)
    order = [each.request_id for each in candidates_to_move(view, policy)]
    assert order == ["short", "long"]
    emptied = replace(view, is_terminating=True)
    order = [each.request_id for each in candidates_to_move(emptied, policy)]
    assert order == ["new", "short", "long"]
    core = scheduler(policy, emptied, full)
    core.on_tick(10.0)
    assert core.destinations == {"i0": "i1"}


@pytest.mark.vllm
def test_the_pages_example_is_served(tmp_path: Path) -> None:
    from sterna.cli.serve.read_options import parse

    path = example(tmp_path)
    args = parse(["serve", "--engine", "emulated", "--policy", f"{path}:NearestPrefix"])
    policy = cluster_config(args).llumlet.policy
    assert (policy.name, policy.looks_at_prefixes) == ("NearestPrefix", True)
