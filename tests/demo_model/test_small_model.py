"""The small model's cache: prepared once, noticed when broken, shared by processes."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("gguf")

import sterna
from sterna.demo_model import small_model
from sterna.demo_model.small_model import (
    SMOLLM2,
    PackagedModel,
    default_cache_folder,
    ensure_small_model,
    fetch_gguf,
    find_fault,
    package_clients,
)
from sterna.errors import ModelPreparationError
from tests.models import write_tiny_gguf
from tests.needed_tools import skip

FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


class Shelf:
    """A package index with one tiny model; it counts how often the model is fetched."""

    def __init__(self, folder: Path) -> None:
        self.gguf_file = folder / "tiny.gguf"
        write_tiny_gguf(self.gguf_file)
        digest = hashlib.sha256(self.gguf_file.read_bytes()).hexdigest()
        self.model = PackagedModel("Tiny", "tiny-model==1.0", "tiny_model/tiny.gguf", digest)
        self.num_fetches = 0

    def fetch(self, model, folder, progress):
        self.num_fetches += 1
        file = folder / model.gguf_file
        file.parent.mkdir(parents=True)
        file.write_bytes(self.gguf_file.read_bytes())
        return file


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def prepare(shelf, tmp_path, lines):
    return lambda: ensure_small_model(tmp_path / "cache", lines.append, shelf.model, shelf.fetch)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_model_is_prepared_once_and_found_from_then_on(prepare, shelf, lines, tmp_path):
    folder = prepare()
    assert folder == tmp_path / "cache" / "models" / "Tiny"
    assert {*FILES, "manifest.json", "tokenizer_config.json"} == set(contents(folder))
    assert "Tiny is ready" in lines[-1]
    lines.clear()
    assert prepare() == folder
    assert (shelf.num_fetches, lines) == (1, [])


def test_only_the_model_and_its_lock_stay_in_the_cache(prepare):
    folder = prepare()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["Tiny", "Tiny.lock"]


def flip_a_bit(file):
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def edit_manifest(edit):
    def damage(file):
        manifest = json.loads(file.read_text())
        edit(manifest)
        file.write_text(json.dumps(manifest))

    return damage


DAMAGES = [
    *((name, damage) for name in FILES for damage in (Path.unlink, truncate, flip_a_bit)),
    ("manifest.json", Path.unlink),
    ("manifest.json", truncate),
    ("manifest.json", lambda file: file.write_text("[]")),
    ("manifest.json", lambda file: file.write_bytes(b"\xff\xfe")),
    ("manifest.json", edit_manifest(lambda manifest: manifest.pop("files"))),
    ("manifest.json", edit_manifest(lambda manifest: manifest["source"].update(conversion=0))),
    ("manifest.json", edit_manifest(lambda manifest: manifest["source"].update(sha256="0"))),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_broken_cache_is_noticed_and_made_whole_again(prepare, shelf, lines, name, damage):
    folder = prepare()
    whole = contents(folder)
    damage(folder / name)
    assert find_fault(folder, shelf.model) is not None
    assert prepare() == folder
    assert contents(folder) == whole
    assert any("is broken" in line for line in lines)
    assert shelf.num_fetches == 2


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_a_preparation_that_was_cut_short_leaves_no_model_and_is_done_anew(
    prepare, shelf, tmp_path, stop
):
    def fetch_half(model, folder, progress):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"half a package")
        raise stop

    with pytest.raises(stop):
        ensure_small_model(tmp_path / "cache", print, shelf.model, fetch_half)
    assert not (tmp_path / "cache" / "models" / "Tiny").exists()
    folder = prepare()
    assert find_fault(folder, shelf.model) is None
    assert sorted(path.name for path in folder.parent.iterdir()) == ["Tiny", "Tiny.lock"]


def test_a_package_that_holds_another_file_is_refused(prepare, shelf, tmp_path):
    flip_a_bit(shelf.gguf_file)
    with pytest.raises(ModelPreparationError, match="does not hold the expected"):
        prepare()
    assert not (tmp_path / "cache" / "models" / "Tiny").exists()


def test_a_package_without_the_file_is_refused(shelf, tmp_path):
    with pytest.raises(ModelPreparationError, match="does not hold the expected"):
        ensure_small_model(
            tmp_path / "cache", print, shelf.model, lambda model, folder, progress: folder / "no"
        )


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(shelf, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelPreparationError, match=r"file/cache: .*STERNA_CACHE"):
        ensure_small_model(tmp_path / "file" / "cache", print, shelf.model, shelf.fetch)


def test_who_finds_another_process_preparing_waits_and_takes_its_model(
    prepare, shelf, tmp_path, lines
):
    made_by_other = ensure_small_model(tmp_path / "other", print, shelf.model, shelf.fetch)
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    is_waiting = threading.Event()

    def progress(line):
        lines.append(line)
        is_waiting.set()

    def wait_for_model():
        ensure_small_model(tmp_path / "cache", progress, shelf.model, shelf.fetch)

    waiter = threading.Thread(target=wait_for_model)
    with (models / "Tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter.start()
        assert is_waiting.wait(timeout=60)
        made_by_other.rename(models / "Tiny")
    waiter.join(timeout=60)
    assert not waiter.is_alive()
    assert lines == ["waiting for another process that is preparing the model"]
    assert shelf.num_fetches == 1


@pytest.fixture
def wheel_folder(shelf, tmp_path, monkeypatch):
    """The tiny model's package in a folder that is the only index of both package clients."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(shelf.gguf_file, "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info"
        # A dependency that is nowhere to be had shows that dependencies are left out.
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    for client in ("UV", "PIP"):
        monkeypatch.setenv(f"{client}_NO_INDEX", "1")
        monkeypatch.setenv(f"{client}_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def client_named(name):
    for command in package_clients():
        if name in (Path(command[0]).name, command[2]):
            return command
    return skip(f"{name} is not installed here")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uv", "pip"])
def test_each_package_client_fetches_the_package_without_its_dependencies(
    shelf, wheel_folder, tmp_path, monkeypatch, name
):
    client = client_named(name)
    monkeypatch.setattr(small_model, "package_clients", lambda: [client])
    file = fetch_gguf(shelf.model, tmp_path / "package", print)
    assert file.read_bytes() == shelf.gguf_file.read_bytes()


def test_the_next_client_is_asked_when_one_fails(shelf, tmp_path, monkeypatch, lines):
    failing = [sys.executable, "-c", "raise SystemExit('no index here')"]
    copying = [
        sys.executable,
        "-c",
        "import shutil, sys, pathlib; file = pathlib.Path(sys.argv[3]) / 'tiny_model/tiny.gguf'; "
        f"file.parent.mkdir(parents=True); shutil.copy({str(shelf.gguf_file)!r}, file)",
    ]
    monkeypatch.setattr(small_model, "package_clients", lambda: [failing, copying])
    file = fetch_gguf(shelf.model, tmp_path / "package", lines.append)
    assert file.read_bytes() == shelf.gguf_file.read_bytes()
    assert lines == ["fetching Tiny from the package index"] * 2


def test_when_no_client_can_fetch_their_complaints_are_told(shelf, tmp_path, monkeypatch):
    clients = [[sys.executable, "-c", f"raise SystemExit('{word}')"] for word in ("red", "blue")]
    monkeypatch.setattr(small_model, "package_clients", lambda: clients)
    with pytest.raises(ModelPreparationError, match=r"red \| .*blue To serve another model"):
        fetch_gguf(shelf.model, tmp_path / "package", print)


def test_without_any_client_the_error_says_so(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(small_model, "package_clients", list)
    with pytest.raises(ModelPreparationError, match="Neither uv nor pip"):
        fetch_gguf(shelf.model, tmp_path / "package", print)


def test_a_long_fetch_is_reported_while_it_lasts(shelf, tmp_path, monkeypatch, lines):
    # The client ends when it can open a pipe that the second report opens too, so that the test
    # waits for events and not for time.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waiting = [sys.executable, "-c", f"open({str(pipe)!r})"]
    monkeypatch.setattr(small_model, "package_clients", lambda: [waiting])
    monkeypatch.setattr(small_model, "FETCH_REPORT_INTERVAL_S", 0.01)

    def progress(line):
        lines.append(line)
        if len(lines) == 3:
            pipe.open("w").close()

    fetch_gguf(shelf.model, tmp_path / "package", progress)
    assert [line.startswith("still fetching") for line in lines[:3]] == [False, True, True]


def test_a_client_that_does_not_end_is_given_up(shelf, tmp_path, monkeypatch):
    hanging = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(small_model, "package_clients", lambda: [hanging])
    monkeypatch.setattr(small_model, "FETCH_REPORT_INTERVAL_S", 0.01)
    monkeypatch.setattr(small_model, "FETCH_TIMEOUT_S", 0.0)
    with pytest.raises(ModelPreparationError, match="no end after"):
        fetch_gguf(shelf.model, tmp_path / "package", print)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_leaving_a_fetch_early_ends_the_client(shelf, tmp_path, monkeypatch, interrupt):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # The client writes its process id and then waits for ever, unless it is killed.
    program = f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); signal.pause()"
    monkeypatch.setattr(small_model, "package_clients", lambda: [[sys.executable, "-c", program]])
    monkeypatch.setattr(small_model, "FETCH_REPORT_INTERVAL_S", 0.01)
    client_pids = []

    def progress(line):
        if line.startswith("still"):
            client_pids.append(int(pipe.read_text()))
            raise interrupt

    with pytest.raises(interrupt):
        fetch_gguf(shelf.model, tmp_path / "package", progress)
    with pytest.raises(ProcessLookupError):
        os.kill(client_pids[0], 0)


def test_the_cache_is_where_the_environment_says(tmp_path):
    environment = {"STERNA_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/elsewhere"}
    assert default_cache_folder(environment) == tmp_path


def test_a_checkout_has_a_cache_of_its_own():
    checkout = Path(__file__).resolve().parents[2]
    assert default_cache_folder({}) == checkout / ".cache" / "sterna"


def test_an_installed_package_uses_the_cache_of_its_user(tmp_path, monkeypatch):
    installed = tmp_path / "lib" / "site-packages" / "sterna" / "__init__.py"
    monkeypatch.setattr(sterna, "__file__", str(installed))
    assert default_cache_folder({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/sterna")
    assert default_cache_folder({}) == Path.home() / ".cache" / "sterna"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_at_once_prepare_one_whole_model(tmp_path):
    environment = {**os.environ, "STERNA_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "sterna.demo_model.small_model"]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=600) for process in processes]
    folder = tmp_path / "models" / SMOLLM2.name
    assert [output.decode().strip() for output, _ in outputs] == [str(folder)] * 2
    assert find_fault(folder) is None
    reports = sorted(report.decode() for _, report in outputs)
    assert sum("is ready in" in report for report in reports) == 1


@pytest.mark.slow
def test_the_real_model_answers_in_english():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_small_model(default_cache_folder(os.environ), print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
