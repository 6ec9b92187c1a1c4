"""A browser, and what tests do with a page in it."""
from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
NEEDED = "tests of the page need a browser: apt-get install chromium chromium-driver"


class Page:
    """A page in a browser, and what tests do with it."""

    def __init__(self, driver: Any, url: str):
        self.driver, self.url = driver, url

    def open(self, path: str = "/") -> None:
        self.driver.get("about:blank")
        self.driver.get(self.url + path)
        self.until(lambda: self.run("return document.body.dataset.server === 'ok'"))

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def module(self, script: str, *args: Any) -> Any:
        """A script with `await` in it."""
        begin = "const done = arguments[arguments.length - 1]; (async () => {"
        return self.driver.execute_async_script(begin + script + "})().then(done, (e) => done('failed: ' + e))", *args)

    def until(self, found: Callable[[], Any], seconds: float = 15) -> Any:
        end = time.monotonic() + seconds
        while not (value := found()):
            assert time.monotonic() < end, self.run("return document.body.innerText")
            time.sleep(0.03)
        return value

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def one(self, css: str) -> Any:
        return self.until(lambda: self.all(css))[0]

    def click(self, css: str) -> None:
        self.run("arguments[0].click()", self.one(css))

    def texts(self, css: str) -> list[str]:
        return [str(t) for t in self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", css)]

    def say(self, text: str) -> None:
        self.one("#composer").send_keys(text + "\n")

    def answered(self, n: int = 1) -> list[str]:
        """The answers, when there are n and all are complete."""
        self.until(lambda: len(self.all(".message.assistant")) >= n and not self.all(".message.pending"))
        return self.texts(".message.assistant > .body")

    def set(self, **values: Any) -> None:
        self.click("#settings-open")
        for name, value in values.items():
            field = self.one(f"#set-{name}")
            field.clear()
            field.send_keys(str(value))
        self.click("dialog .primary")
        self.until(lambda: not self.all("dialog"))

    def network(self, offline: bool) -> None:
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {
            "offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1})

    def kept(self) -> list[dict[str, Any]]:
        """The conversations in the browser's storage."""
        raw = self.run("return Object.entries(localStorage).filter(([k]) => k.startsWith('ggraph.chat.')).map(([, v]) => v)")
        return [json.loads(text) for text in raw]
