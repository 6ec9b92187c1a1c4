"""A real server in a process of its own, with the tiny model, and how to talk to it; a browser that looks at its page."""
from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.tools.server.browser import CHROMIUM, DRIVER, NEEDED, Page

pytest.importorskip("fastapi")


class Server:
    """`url` of a started server; what it says is in `log`."""

    def __init__(self, *args: str):
        command = [sys.executable, "-W", "error", "-m", "ggraph.tools.server", "--port", "0", "-t", "1", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line)
                if "listening" in line:
                    self._listening.set()
        self._listening.set()

    @property
    def url(self) -> str:
        assert self._listening.wait(30)
        found = next((m for line in self.log if (m := re.search(r"https?://\S+", line))), None)
        assert found, self.log
        return found[0]

    def wait(self) -> Server:
        """Until the model is loaded."""
        for _ in range(600):
            if httpx.get(self.url.rstrip("/") + "/health").status_code == 200:
                return self
            self._reader.join(0.05)
        raise AssertionError(self.log)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(20)
        self._reader.join(5)
        return code


@contextmanager
def running(*args: str) -> Iterator[Server]:
    server = Server(*args)
    try:
        yield server.wait()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("server") / "tiny.gguf"))


@pytest.fixture(scope="session")
def slots_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="session")
def server(file: str, slots_folder: Path) -> Iterator[Server]:
    with running("-m", file, "-c", "512", "-np", "4", "--seed", "42", "--metrics", "--slot-save-path", str(slots_folder),
                 "-a", "tiny", "-ub", "64") as server:
        yield server
        assert server.process.poll() is None, server.log
        assert server.stop() == 0


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


# --- a browser


@pytest.fixture(scope="session")
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{NEEDED}", file=sys.stderr)           # also without -rs
        pytest.skip(NEEDED)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,860"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for answers that take a while."""
    return tiny.write(tmp_path_factory.mktemp("page") / "long.gguf", llama__context_length=16384)


@pytest.fixture(scope="session")
def url(long: Path) -> Iterator[str]:
    """Answers of 24 tokens, always the same ones, unless a request says something else."""
    with running("-m", str(long), "-c", "16384", "-np", "2", "--temp", "0", "--ignore-eos", "-n", "24", "-a", "tiny",
                 "--metrics", "--inspect") as server:
        yield server.url


@pytest.fixture
def here(driver: Any, url: str) -> Iterator[Page]:
    """The page, with nothing in its storage; afterwards, that it asked no other host and that nothing was refused."""
    found = Page(driver, url)
    driver.get(url + "/page/icon.svg")
    driver.execute_script("localStorage.clear()")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.get_log("browser")
    found.open()
    yield found
    asked = found.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert all(name.startswith(("http://127.0.0.1:", "data:")) for name in asked)
    wrong = [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    assert not [text for text in wrong if "Failed to load resource" not in text]
