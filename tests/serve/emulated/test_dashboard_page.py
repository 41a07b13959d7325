"""The dashboard in a headless Chromium: over a server of emulated instances under load, and over a
recorded simulation.

`make screenshots` keeps the pictures of the README, which the last tests take.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import aiohttp
import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from bench.serving.ports import free_port
from sterna.cli.operate.admin_commands import ask
from tests.needed_tools import missing_program, needs
from tests.serve.emulated.quick import completion, many_connections, num_tokens, quick_server
from tests.serve.server import HANG_TIMEOUT_S, ServerProcess

CHROMIUM = which("chromium") or "chromium"

pytestmark = [
    *(pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)),
    needs(missing_program("chromium", "chromium")),
]

MAX_BYTES_A_SECOND = 20_000
KEY = "key-of-an-operator"
NUM_STREAMS = 6
MAX_TOKENS = 900
"""Of each stream: some 18 seconds, and memory for all of them."""

RUN = (
    *("--trace", "M-M", "--rate", "3.9", "--requests", "1200", "--instances", "8"),
    *("--policy", "sterna", "--high-fraction", "0.1"),
)
"""The simulation of the pictures."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers do not give.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


class Shown:
    """The dashboard in a tab of its own, and what its console has said."""

    def __init__(self, browser: Browser, url: str, **look: Any) -> None:
        self.page: Page = browser.new_page(**look)
        self.page.set_default_timeout(1000 * HANG_TIMEOUT_S)
        self.errors: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser itself names every answer and connection that failed; the page handles them.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a frame with which this holds."""
        deadline_s = time.monotonic() + HANG_TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, (
                f"never {what}; the page shows {self.text('state')}"
            )
            seen = self.page.evaluate("document.body.dataset.frames || 0")
            self.page.wait_for_function(
                "seen => (document.body.dataset.frames || 0) != seen", arg=seen
            )

    def until_live(self) -> None:
        self.page.wait_for_selector("#state.live")

    def enter_key(self) -> None:
        self.page.wait_for_selector("#ask:not([hidden])")
        self.page.fill("#secret", KEY)
        self.page.click("#key button")


@contextmanager
def load(url: str) -> Iterator[None]:
    """Streams that have begun, and are read until the context ends."""
    begun, ended = threading.Event(), threading.Event()

    async def stream(http: aiohttp.ClientSession, number: int) -> None:
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": f"tern{number}"}
        body = completion(number, MAX_TOKENS)
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            await num_tokens(answer)

    async def run() -> None:
        async with many_connections() as http, asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(stream(http, number))
            begun.set()

    def read() -> None:
        try:
            asyncio.run(run())
        finally:
            ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.wait(HANG_TIMEOUT_S)
        thread.join()


def listed(server: ServerProcess) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ask(server.url, "GET", "/admin/instances", KEY)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


def test_the_page_shows_the_load_and_a_request_that_moves(browser: Browser, folder: Path) -> None:
    options = ("--instances", "2", "--frontends", "2", "--api-key", KEY)
    with quick_server(folder, *options) as server:
        shown = Shown(browser, f"{server.url}/dashboard")
        shown.enter_key()
        shown.until_live()
        assert shown.text("title").startswith("Sterna · ")
        with load(server.url):
            shown.until(lambda: shown.text("running") == str(NUM_STREAMS), "shown all streams")
            rows = listed(server)
            wells = {
                well.get_attribute("data-instance"): well.get_attribute("data-running")
                for well in shown.page.query_selector_all(".well")
            }
            assert wells == {row["id"]: str(row["running"]) for row in rows}
            assert shown.text("instances") == "2"
            requests = ask(server.url, "GET", "/admin/requests", KEY)
            titles = shown.page.eval_on_selector_all(
                ".request:not(.rest)", "all => all.map(e => e.title)"
            )
            assert len(titles) == NUM_STREAMS == len(requests)
            (one,) = (each for each in requests if "tern0" in each["id"])
            (other,) = {row["id"] for row in rows} - {one["instance"]}
            ask(server.url, "POST", "/admin/migrate", KEY, {"request": "tern0", "to": other})
            moved = f".request[data-moved][data-instance='{other}']"
            shown.until(lambda: shown.page.query_selector(moved) is not None, "moved the request")
            shown.until(
                lambda: f"moved {one['instance']} to {other}" in shown.text("decisions"), "said so"
            )
            assert re.fullmatch(r"median [\d.]+ s, P99 [\d.]+ s", shown.text("ttft-now"))
        shown.until(lambda: shown.text("running") == "0", "shown that all have ended")
        shown.until(lambda: "ms" in shown.text("tpot-now"), "shown the times per token")
        assert shown.errors == []
        shown.page.close()


def test_frames_are_few_bytes(folder: Path) -> None:
    with quick_server(folder, "--instances", "2") as server, load(server.url):
        with httpx.stream("GET", f"{server.url}/admin/watch", timeout=HANG_TIMEOUT_S) as answer:
            begin_s = time.monotonic()
            num_bytes = num_frames = 0
            for chunk in answer.iter_bytes():
                num_bytes += len(chunk)
                num_frames += chunk.count(b"\n\n")
                if num_frames >= 6:
                    break
        assert num_frames >= 6
        assert num_bytes / (time.monotonic() - begin_s) < MAX_BYTES_A_SECOND


def test_the_page_survives_a_restart_of_the_server(browser: Browser, folder: Path) -> None:
    port = str(free_port())
    with quick_server(folder, "--instances", "1", "--port", port):
        shown = Shown(browser, f"http://127.0.0.1:{port}/dashboard")
        shown.until_live()
    shown.page.wait_for_selector("#state.away")
    with quick_server(folder, "--instances", "2", "--port", port):
        shown.until_live()
        shown.until(lambda: shown.text("instances") == "2", "shown the new server")
        assert shown.errors == []
    shown.page.close()


@pytest.fixture(scope="module")
def replayed(folder: Path) -> Iterator[str]:
    """The address of a replay."""
    file, port = folder / "run.gz", free_port()
    sterna = (sys.executable, "-m", "sterna.cli.main")
    subprocess.run([*sterna, "simulate", *RUN, "--json", "--record", file], check=True, stdout=-3)
    options = ("--port", str(port), "--from", "150")
    with subprocess.Popen([*sterna, "replay", file, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"http://127.0.0.1:{port}/"
        process.kill()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_recorded_simulation_is_shown(
    browser: Browser, replayed: str, folder: Path, scheme: str
) -> None:
    shown = Shown(browser, replayed, color_scheme=scheme, viewport={"width": 1100, "height": 860})
    shown.until_live()
    shown.until(lambda: len(shown.page.query_selector_all("polyline.p99")) > 0, "drawn latencies")
    shown.until(lambda: int(shown.page.evaluate("document.body.dataset.frames")) > 25, "replayed")
    assert shown.text("instances") == "8"
    assert shown.page.query_selector(".request[data-moved]") is not None
    ground = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert (brightness > 128) == (scheme == "light")
    pictures = Path(os.environ.get("STERNA_SCREENSHOTS", folder))
    shown.page.screenshot(path=pictures / f"dashboard_{scheme}.png")
    assert shown.errors == []
    shown.page.close()


def test_the_page_fits_a_phone(browser: Browser, replayed: str) -> None:
    shown = Shown(browser, replayed, viewport={"width": 390, "height": 844}, is_mobile=True)
    shown.until_live()
    shown.until(lambda: int(shown.page.evaluate("document.body.dataset.frames")) > 2, "replayed")
    widths = shown.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    wells = shown.page.eval_on_selector_all(".well", "all => all.map(e => e.offsetWidth)")
    assert len(wells) == 8
    assert min(wells) >= 48
    shown.page.close()
