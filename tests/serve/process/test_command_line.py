"""Bad input to `sterna`: one clear line, and nothing was started."""

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from sterna.cli.main import main
from sterna.cli.serve import read_options
from sterna.cli.serve.read_options import parse, read
from sterna.cli.serve.serve_command import engine_environment
from sterna.cli.serve.serve_options import cluster_config
from sterna.engine.model_files import weight_bytes_of
from sterna.errors import ConfigurationError, SternaError
from sterna.runtime.home import options_process
from tests.models import small_model

pytestmark = pytest.mark.vllm

MIB = 1 << 20
DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Options become environment variables and set the level of the log: other tests must see none
    of these."""
    before = dict(os.environ)
    logger = logging.getLogger("sterna")
    level, outputs, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    # pytest keeps what is logged, and the errors in it hold all that their frames do.
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = outputs, propagate
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Reads options that must be refused, in this process, where the server has one of its own that
    imports vLLM first; returns the reason, which is all that is said."""

    os.environ.update(engine_environment())

    def refusal(*options: str) -> str:
        with pytest.raises(ConfigurationError) as refused:
            read(["serve", *options])
        captured = capfd.readouterr()
        assert captured.out + captured.err == ""
        (line,) = str(refused.value).splitlines()
        return line

    return refusal


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        file = tmp_path / "options.yaml"
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--flying"], "unrecognized arguments: --flying"),
        (
            ["--max-modl-len", "5"],
            "unrecognized arguments: --max-modl-len 5 (did you mean --max-model-len?)",
        ),
        (["--port", "8123", "bird", "fish"], "unrecognized arguments: bird fish (name one model: "),
        (["--enable-prefix-caching", "true"], "unrecognized arguments: true (name one model: "),
        (["--instances", "2", "4"], "unrecognized arguments: 4 (name one model: "),
        (
            ["--served-model-name", "tern", "org/model"],
            "--served-model-name takes org/model as well: name the model before it, or by --model",
        ),
        (
            ["--api-key", "bird", "org/model", "--instances", "2"],
            "--api-key takes more than one word: name the model before it, or by --model",
        ),
        (["--api-kye", "bird"], "unrecognized arguments: --api-kye (did you mean --api-key?)"),
        (["--hf-tokn=bird"], "unrecognized arguments: --hf-tokn (did you mean --hf-token?)"),
        (["--port", "0"], "--port 0: choose a port in [1, 65535]"),
        (["/no/such/model"], "model /no/such/model is not there"),
        (["--instances", "0"], "instances must be at least 1, not 0"),
        (["--instances", "some"], "argument --instances: invalid int value: 'some'"),
        (["--frontends", "0"], "frontends must be at least 1, not 0"),
        (["--policy", "best"], "policy must be one of llumnix, llumnix-base, infaas++, "),
        (["--transport", "pigeon"], "argument --transport: invalid choice: 'pigeon'"),
        (["--migration-interval", "0"], "--migration-interval must be positive, not 0.0"),
        (["--migration-concurrency", "0"], "--migration-concurrency must be at least 1, not 0"),
        (
            ["--migration-bandwidth-share", "2"],
            "--migration-bandwidth-share must be in (0, 1], not 2.0",
        ),
        (["--data-parallel-size", "2"], "--data-parallel-size 2: Sterna runs the replicas itself"),
        (["--api-server-count", "3"], "--api-server-count 3: use --frontends 3"),
        (["--headless"], "--headless is not supported"),
        (["--distributed-executor-backend", "ray"], "--distributed-executor-backend ray: Sterna"),
        (
            ["--frontends", "2", "--max-num-queued-reqs", "9"],
            "would count its own requests alone; use --max-queued-requests",
        ),
        (["--device-ids", "0"], "--device-ids: Ray gives each instance its devices"),
        (["--uds", "/tmp/socket"], "--uds is not supported; use --host and --port"),
        (["--nnodes", "2"], "--nnodes 2: an instance is on one node, and Ray knows the nodes"),
        (["--enable-elastic-ep"], "--enable-elastic-ep is not supported"),
        (["--numa-bind"], "--numa-bind: vLLM binds ranks that have processes of their own"),
        (
            ["--numa-bind", "--numa-bind-nodes", "0", "1", "--tensor-parallel-size", "2"],
            "leave --numa-bind-nodes and --numa-bind-cpus out",
        ),
        (["--scheduler-cls", "a.B"], "--scheduler-cls: Sterna brings its own scheduler class"),
        (["--worker-extension-cls", "a.B"], "--worker-extension-cls: Sterna brings its own"),
        (
            ["--kv-events-config", '{"enable_kv_cache_events": true}'],
            "--kv-events-config: each instance would bind tcp://*:5557, which only one can; give",
        ),
        (
            [
                *("--kv-events-config.enable_kv_cache_events", "true"),
                *("--kv-events-config.endpoint", "ipc:///tmp/events"),
                *("--kv-events-config.replay_endpoint", "tcp://*:5558"),
            ],
            "each instance would bind ipc:///tmp/events and tcp://*:5558, which only one can",
        ),
        (["--instances", "500"], "500 instances need about "),
        (["--max-instances", "500"], "lower --max-instances or --kv-cache-memory-bytes"),
        (["--kv-cache-memory-bytes", "9000g"], "2 instances need about "),
        (["--max-model-len", "99999"], "User-specified max_model_len (99999) is greater than"),
        (["--max-num-seqs", "0"], "max_num_seqs: Input should be greater than or equal to 1"),
        (["--dtype", "float17"], "argument --dtype: invalid choice: 'float17'"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "nope"], "invalid tool call parser"),
        (
            ["--chat-template", "nofile.jinja"],
            "The supplied chat template string (nofile.jinja) appears path-like",
        ),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (
            ["--host", "203.0.113.7", "--port", "8123"],
            "cannot listen on 203.0.113.7:8123 (Cannot assign requested address); choose another "
            "--port or --host",
        ),
        (["--host", "2001:db8::7"], "cannot listen on 2001:db8::7:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_that_cannot_work_is_refused_in_one_line(
    refusal, options: list[str], message: str
):
    assert message in refusal(*options)


def test_adapters_are_loaded_at_run_time_by_one_front_end_only(refusal, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert "--frontends 2: with VLLM_ALLOW_RUNTIME_LORA_UPDATING" in refusal("--frontends", "2")


def test_cores_are_not_named_for_an_instance_without_processes_of_ranks(refusal, monkeypatch):
    monkeypatch.setenv("STERNA_VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert "VLLM_CPU_OMP_THREADS_BIND=0-3: vLLM binds ranks that have" in refusal()


def test_responses_are_stored_by_one_front_end_only(refusal, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    assert "--frontends 2: with VLLM_ENABLE_RESPONSES_API_STORE" in refusal("--frontends", "2")


@pytest.mark.parametrize(
    "events",
    [
        {"enable_kv_cache_events": False},
        {"enable_kv_cache_events": True, "publisher": "null"},
        {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"},
        {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"},
    ],
)
def test_events_that_bind_no_port_of_their_own_are_not_refused(events: dict[str, object]):
    args = parse(["serve", "--kv-events-config", json.dumps(events)])
    assert args.kv_events_config.enable_kv_cache_events is events["enable_kv_cache_events"]


def test_a_folder_without_a_model_is_refused(refusal, tmp_path: Path):
    assert refusal(str(tmp_path)).endswith("is not a model folder (no config.json)")


def test_a_model_that_vllm_does_not_know_is_refused(refusal, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["Bird"], "model_type": "bird"}')
    assert "bird" in refusal(str(tmp_path))


def test_a_taken_port_is_refused(refusal):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal("--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flying: 1", "unrecognized arguments: --flying 1"),
        ("instances: 0", "instances must be at least 1, not 0"),
        ("a: [1", "no YAML"),
        ("- instances", "expected lines like `option: value`"),
        ("", "expected lines like `option: value`"),
    ],
)
def test_a_bad_config_file_is_refused_in_one_line(refusal, config_file, text: str, message: str):
    assert message in refusal("--config", config_file(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "/no/file.yaml"], "--config /no/file.yaml: there is no such file"),
        (["--config"], "--config: name a file"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config: give one file, not several"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_refused(refusal, options: list[str], message: str):
    assert message in refusal(*options)


@pytest.mark.parametrize("joint", ["=", " "])
def test_options_come_from_a_config_file_and_the_command_line_goes_before_it(
    config_file, joint: str
):
    file = config_file(
        """
        instances: 3
        policy: llumnix
        transport: tcp
        no-migration: true
        max-model-len: 1024
        enable-prefix-caching: false
        served-model-name: [tern, bird]
        limit-mm-per-prompt: {image: 2}
        """
    )
    args = parse(["serve", *f"--config{joint}{file}".split(), "--transport", "gloo"])
    assert (args.instances, args.policy, args.transport) == (3, "llumnix", "gloo")
    assert args.no_migration
    assert args.max_model_len == 1024
    assert args.enable_prefix_caching is False
    assert args.served_model_name == ["tern", "bird"]
    assert args.limit_mm_per_prompt == {"image": 2}


def test_several_names_of_the_small_model_may_stand_in_a_file_or_in_front(config_file):
    config = config_file("served-model-name: [tern, auk]")
    assert parse(["serve", "--config", config]).served_model_name == ["tern", "auk"]
    args = parse(["serve", "--served-model-name", "tern", "auk", "--tokenizer", "auk"])
    assert args.served_model_name == ["tern", "auk"]


def test_a_config_file_may_name_the_model(config_file):
    args = parse(["serve", "--config", config_file(f"model: {small_model()}")])
    assert args.model == str(small_model())


def test_the_model_of_the_command_line_goes_before_that_of_the_file(config_file):
    config = config_file("model: /no/such/model")
    assert parse(["serve", str(small_model()), "--config", config]).model == str(small_model())


@pytest.mark.parametrize(
    "form",
    [
        ["--model", "{}"],
        ["--model={}"],
        ["{}"],
        ["--tokenizer", "{}", "{}", "--instances", "2"],
        ["--instances", "2", "{}"],
    ],
)
def test_the_model_can_be_named_in_each_of_vllms_ways(form: list[str]):
    options = [each.format(small_model()) for each in form]
    assert parse(["serve", *options]).model == str(small_model())


def test_the_model_behind_options_goes_before_that_of_the_file(config_file):
    config = config_file("model: /no/such/model")
    args = parse(["serve", "--config", config, "--instances", "2", str(small_model())])
    assert args.model == str(small_model())


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.glob("docker/Dockerfile.*")), ids=lambda each: each.name
)
def test_the_command_of_an_image_takes_what_manifests_give_it(path: Path):
    """Of the image's own options and those behind its name the model is not the first."""
    (line,) = [each for each in path.read_text().splitlines() if each.startswith("ENTRYPOINT")]
    command = json.loads(line.removeprefix("ENTRYPOINT"))
    manifests = yaml.safe_load_all((DEPLOY / "kubernetes" / "sterna.yaml").read_text())
    (deployment,) = [each for each in manifests if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "command" not in container
    _, *options = container["args"]
    args = parse([*command[command.index("serve") :], str(small_model()), *options])
    assert (args.model, args.host, args.instances) == (str(small_model()), "0.0.0.0", 4)


def test_without_a_model_the_small_one_is_served_under_its_name():
    args = parse(["serve"])
    assert args.model == str(small_model())
    assert args.served_model_name == ["SmolLM2-135M-Instruct"]


def test_the_small_model_can_be_served_under_another_name():
    assert parse(["serve", "--served-model-name", "tern"]).served_model_name == ["tern"]


def test_options_of_the_policy_and_the_transport_reach_the_cluster():
    args = parse(
        [
            *("serve", "--policy", "llumnix", "--migration-threshold", "77"),
            *("--migration-interval", "0.5", "--migration-concurrency", "3"),
            *("--migration-bandwidth-share", "0.25", "--transport", "tcp", "--no-migration"),
            *("--instances", "3", "--frontends", "2"),
        ]
    )
    config = cluster_config(args)
    policy = config.llumlet.policy
    assert policy.name == "llumnix"
    assert (policy.source_freeness_steps, policy.destination_freeness_steps) == (77, 77)
    assert (policy.round_interval_s, policy.num_concurrent_migrations) == (0.5, 3)
    assert not policy.migrates
    assert (config.transport.kind, config.transport.bandwidth_share) == ("tcp", 0.25)
    assert (config.num_instances, config.num_frontends) == (3, 2)


def test_instances_share_the_memory_when_nothing_is_said_about_it(monkeypatch):
    available = 20 << 30
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: type("Memory", (), {"available": available})
    )
    two, five = (
        parse(["serve", str(small_model()), "--instances", str(instances)]) for instances in (2, 5)
    )
    cluster_config(two)
    cluster_config(five)
    assert two.kv_cache_memory_bytes == 4 << 30
    assert 1 << 30 < five.kv_cache_memory_bytes < (available / 5)


def test_weights_take_twice_their_size_in_32_bits(monkeypatch):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: type("Memory", (), {"available": 12 << 30})
    )
    stored, wider = (
        parse(["serve", str(small_model()), "--instances", "5", "--dtype", dtype])
        for dtype in ("bfloat16", "float32")
    )
    cluster_config(stored)
    cluster_config(wider)
    weight_bytes = weight_bytes_of(small_model())
    assert stored.kv_cache_memory_bytes - wider.kv_cache_memory_bytes == weight_bytes > 0


def test_memory_that_is_asked_for_is_left_as_it_is():
    args = parse(["serve", str(small_model()), "--kv-cache-memory-bytes", str(300 * MIB)])
    cluster_config(args)
    assert args.kv_cache_memory_bytes == 300 * MIB


def test_instances_that_could_not_even_have_a_small_cache_are_refused():
    args = parse(["serve", str(small_model()), "--instances", "300"])
    with pytest.raises(ConfigurationError, match="300 instances need about"):
        cluster_config(args)


def test_help_lists_groups_and_searches(capsys: pytest.CaptureFixture[str]):
    for search, expected in (
        ("--help", ["Sterna", "ModelConfig"]),
        ("--help=Sterna", ["--instances", "--migration-threshold", "(default: the policy's)"]),
        ("--help=max-model-len", ["--max-model-len"]),
    ):
        with pytest.raises(SystemExit) as end:
            main(["serve", search])
        assert end.value.code == 0
        out = capsys.readouterr().out
        for text in expected:
            assert text in out
        assert "None)" not in out or search != "--help=Sterna"


@pytest.mark.parametrize("command", ["serve", "profile"])
def test_help_names_the_command_that_has_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
):
    # A search of another test in this process would go on.
    parser = "vllm.utils.argparse_utils.FlexibleArgumentParser"
    monkeypatch.setattr(f"{parser}._search_keyword", None)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert f"sterna {command} --help=all" in out
    assert "vllm serve --help" not in out


def test_help_of_all_commands_does_not_load_the_engine():
    script = (
        "import sys; from sterna.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: assert not {'vllm', 'torch', 'ray'} & sys.modules.keys()"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    for command in ("serve", "instances", "requests", "migrate"):
        assert command in result.stdout


def test_a_reader_that_has_read_enough_is_no_error():
    """As in `sterna simulate --json | head -1`."""
    script = str(Path(sys.executable).with_name("sterna"))
    process = subprocess.Popen(
        [script, "simulate", "--json", "--requests", "20", "--rate", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 141
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


def test_ray_is_not_imported_before_its_environment_is_set():
    script = "import sys, sterna.cli.serve.serve_command\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_options_are_the_same_where_a_process_of_their_own_has_read_them():
    arguments = ["serve", str(small_model()), "--engine", "emulated", "--policy", "llumnix"]
    here, there = read(arguments), options_process.ask(read_options.__file__, arguments)
    assert there.serve.config == here.serve.config
    assert there.serve.emulated == here.serve.emulated
    assert there.example == here.example
    assert there.engine == here.engine
    assert there.compiles is here.compiles is False
    ours, theirs = (pickle.loads(each.serve.args.for_frontends) for each in (here, there))
    assert vars(theirs) == vars(ours)


def test_a_refusal_comes_from_the_process_that_reads():
    with pytest.raises(ConfigurationError, match="model /no/such/model is not there"):
        options_process.ask(read_options.__file__, ["serve", "/no/such/model"])


def test_a_reading_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options_process, "forked_command", lambda: [sys.executable, "-c", "pass"])
    with pytest.raises(SternaError, match="the process that reads the options has ended"):
        options_process.ask(read_options.__file__, ["serve"])


@pytest.mark.slow
def test_the_console_script_ends_with_a_status_and_one_line():
    script = str(Path(sys.executable).with_name("sterna"))
    result = subprocess.run(
        [script, "serve", "/no/such/model"], capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "sterna: error: model /no/such/model is not there\n"


def test_a_command_without_its_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["instances", "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sterna: error: no Sterna server answers at {url} (")
    assert "start one with `sterna serve`" in line


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[", "ftp://127.0.0.1/x"])
def test_a_command_with_a_wrong_url_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], url: str
):
    assert main(["instances", "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sterna: error: no Sterna server answers at {url} (")


def test_a_command_that_reaches_another_server_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "admin").mkdir()
    (tmp_path / "admin" / "instances").write_text("<html>terns</html>")
    files = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        assert main(["instances", "--url", url]) == 1
        other.shutdown()
    assert f"no Sterna server answers at {url} (" in capsys.readouterr().err.splitlines()[-1]


def test_the_groups_of_an_engine_listen_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo would listen on the address of the machine's name; what the user has set holds."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert engine_environment()["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert engine_environment()["GLOO_SOCKET_IFNAME"] == "eth1"
