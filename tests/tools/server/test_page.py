"""The page at /: its files and their headers; and in a real browser, against a real server, what a person does with it."""
from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ggraph.tools.server import page
from ggraph.tools.server.app import make_app
from ggraph.tools.server.service import Options
from tests import tiny
from tests.tools.server.conftest import running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
NEEDED = "tests of the page need a browser: apt-get install chromium chromium-driver"


# --- files and headers


def asked(path: str, options: Options, **headers: str) -> httpx.Response:
    """While the model loads."""
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(lambda: None, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path, headers=headers)
    return asyncio.run(ask())


def files() -> list[str]:
    return ["/", *(f"/page/{p.name}" for p in page.FOLDER.iterdir() if p.name != "index.html")]


@pytest.mark.parametrize("path", files())
def test_files_come_without_a_key_and_while_the_model_loads(path: str) -> None:
    got = asked(path, Options(api_keys=("k",)))
    assert got.status_code == 200 and got.content
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert got.headers["x-content-type-options"] == "nosniff"
    again = asked(path, Options(), **{"If-None-Match": got.headers["etag"]})
    assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_no_ui(path: str) -> None:
    got = asked(path, Options(ui=False))
    assert got.status_code == 404 and got.json()["error"]["message"] == "File Not Found"


def test_only_the_files_of_the_folder() -> None:
    for path in ("/page/", "/page/none.js", "/page/../page.py", "/page/%2e%2e/page.py", "/page/index.html"):
        assert asked(path, Options()).status_code == 404


MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|<script>|style="


PAIRS = [("text", "bg"), ("text", "panel"), ("text", "raised"), ("soft", "bg"), ("soft", "panel"), ("soft", "raised"),
         ("accent", "bg"), ("accent", "tint"), ("on-accent", "accent"), ("error", "error-tint"), ("text", "tint"), ("bg", "text"),
         *(("text", f"p{i}") for i in range(4)), *((name, "panel") for name in "ksnc")]


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it, of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    channels = [int(digits[i:i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(scheme: int) -> None:
    """A contrast of 4.5, which WCAG asks for at level AA."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", (page.FOLDER / "base.css").read_text())
    shade = {name: luminance(colours[scheme]) for name, *colours in found}
    for pair in PAIRS:
        low, high = sorted(shade[name] for name in pair)
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair


def test_the_files_name_no_other_host_and_make_no_markup() -> None:
    for path in page.FOLDER.iterdir():
        text = path.read_text()
        assert path.suffix in page.TYPES
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path.name
        assert not re.search(MARKUP, text), path.name


# --- in a browser


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


def test_send(here: Page) -> None:
    here.say("the rain in the lane")
    answer, = here.answered()
    assert answer and here.texts(".message.user > .body") == ["the rain in the lane"]
    body = {"messages": [{"role": "user", "content": "the rain in the lane"}]}
    told = httpx.post(here.url + "/v1/chat/completions", timeout=60, json=body).json()["choices"][0]["message"]["content"]
    assert [m["content"] for m in here.kept()[0]["messages"].values()] == ["the rain in the lane", told]
    assert here.texts(".actions") == ["", ""]                                       # icons alone
    assert re.search(r"24 tokens · [\d.,]+ tokens/s", " ".join(here.texts(".speed")))
    assert here.texts("#conversations a") == ["the rain in the lane"] and here.run("return location.hash").startswith("#/chat/")


def test_stream_stop_and_continue(here: Page) -> None:
    here.set(max_tokens=16000)
    here.say("a long one")

    def length() -> int:
        return len("".join(here.texts(".message.assistant.pending > .body")))
    seen = here.until(lambda: (n := length()) > 20 and n)
    here.until(lambda: length() > seen)                                             # it comes piece by piece
    assert here.one("#send").get_attribute("aria-label") == "Stop"
    here.click("#send")
    cut, = here.answered()
    assert "Stopped." in here.texts(".notice")[0] and here.one("#send").get_attribute("aria-label") == "Send"
    here.until(lambda: not any(s["is_processing"] for s in httpx.get(here.url + "/slots").json()))      # the server's, too
    here.set(max_tokens=8)
    here.click(".notice .link")
    more, = here.answered()
    assert len(more) > len(cut) and more.startswith(cut.rstrip()[:20])


def test_edit_regenerate_and_versions(here: Page) -> None:
    here.say("one")
    first, = here.answered()
    here.say("two")
    assert len(here.answered(2)) == 2
    here.click(".message.assistant:last-child [aria-label='Answer again']")
    here.until(lambda: here.texts(".versions") == ["2 / 2"])
    here.answered(2)
    here.click(".message.user [aria-label=Edit]")
    area = here.one(".edit textarea")
    area.clear()
    area.send_keys("three\n")
    here.until(lambda: here.texts(".message.user > .body") == ["three"])
    assert len(here.answered()) == 1 and here.texts(".versions") == ["2 / 2"]
    here.click("[aria-label='Previous version']")                                   # and the old branch is still there
    assert here.texts(".message.user > .body") == ["one", "two"] and here.texts(".message.assistant > .body")[0] == first


def test_delete_and_undo(here: Page) -> None:
    here.say("one")
    here.answered()
    here.click(".message.assistant [aria-label=Delete]")
    assert here.texts(".message.assistant") == []
    here.click(".toast .link")
    assert len(here.texts(".message.assistant")) == 1
    here.click("[aria-label='Delete conversation']")
    assert here.texts("#conversations a") == [] and here.kept() == []


def test_a_reload_keeps_conversations(here: Page) -> None:
    here.set(system="be brief", temperature="0.5")
    for text in ("first talk", "second talk"):
        here.click("#new")
        here.say(text)
        here.answered()
    said = here.texts(".message > .body")
    here.driver.refresh()
    here.until(lambda: here.texts(".message > .body") == said)
    assert here.texts("#conversations a") == ["second talk", "first talk"]
    here.click("#conversations li:nth-child(2) a")
    here.until(lambda: here.texts(".message.user > .body") == ["first talk"])
    here.one("#find").send_keys("second")
    here.until(lambda: here.texts("#conversations a") == ["second talk"])


def test_a_reload_in_the_middle_of_an_answer(here: Page) -> None:
    here.set(max_tokens=16000)
    here.say("a long one")
    here.until(lambda: here.kept() and any(len(m["content"]) > 20 for m in here.kept()[0]["messages"].values() if m.get("pending")))
    here.driver.refresh()
    here.until(lambda: "Stopped." in " ".join(here.texts(".notice")))
    assert len(here.texts(".message.assistant > .body")[0]) > 20


def test_another_tab_follows(here: Page) -> None:
    here.say("one")
    here.answered()
    first = here.driver.current_window_handle
    here.driver.switch_to.new_window("tab")
    try:
        here.open()
        here.click("#conversations a")
        here.until(lambda: here.texts(".message.user > .body") == ["one"])
        here.say("two")
        here.answered(2)
    finally:
        here.driver.close()
        here.driver.switch_to.window(first)
    here.until(lambda: here.texts(".message.user > .body") == ["one", "two"] and not here.all(".pending"))


def test_settings_reach_the_server(here: Page) -> None:
    here.run("""window.sent = []; const send = window.fetch;
        window.fetch = (url, options) => { if (options?.body) sent.push(JSON.parse(options.body)); return send(url, options); }""")
    here.set(system="be brief", temperature="0.5", top_k=7, max_tokens=3, stop=r"\n\n, END", n_probs=2)
    here.say("hello")
    here.answered()
    body, = here.run("return sent")
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    want = {"temperature": 0.5, "top_k": 7, "max_tokens": 3, "stop": ["\n\n", "END"], "top_logprobs": 2, "stream": True}
    assert body.items() >= want.items()
    here.click("[aria-label='Token probabilities']")
    assert len(here.all(".token")) == 3
    here.click(".token")
    assert all("%" in text for text in here.texts(".alt")) and len(here.all(".alt")) >= 2


def test_errors_are_shown(here: Page) -> None:
    here.run("document.getElementById('composer').value = 'x'.repeat(40000)")
    here.one("#composer").send_keys("\n")
    assert "exceeds the available context size" in here.until(lambda: here.texts(".notice.error"))[0]
    here.click("#new")
    here.network(offline=True)
    try:
        here.say("hello")
        assert "cannot be reached" in here.until(lambda: here.texts(".notice.error"))[0]
        here.until(lambda: "Trying again" in here.texts("#banner")[0])
    finally:
        here.network(offline=False)
    here.until(lambda: here.texts("#banner") == [""] and here.texts("#model-name") == ["tiny"])      # it has found it again
    here.click(".notice.error .link")                                               # try again
    assert here.answered()[0] and not here.all(".notice.error")


def test_slots(here: Page) -> None:
    here.set(max_tokens=16000)
    here.say("keep going")
    here.until(lambda: here.texts(".message.assistant > .body")[:1])
    here.click(".tabs [data-view=slots]")
    here.until(lambda: here.all(".slot.writing"))
    assert len(here.all(".slot")) == 2 and len(here.all(".slot.idle")) == 1
    assert re.search(r"\d+ of 16,384 tokens", here.texts(".slot.writing")[0]) and "1 of 2" in here.texts(".facts")[0]
    looks = "return performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/slots')).length"
    n = here.run(looks)
    here.until(lambda: here.run(looks) > n)                                         # it looks again
    here.click(".tabs [data-view=chat]")
    time.sleep(0.3)                                                                 # a look may be under way
    n = here.run(looks)
    time.sleep(1.5)
    assert here.run(looks) == n                                                     # nobody looks, nobody asks
    here.one("body").send_keys("\ue00c")                                           # Escape
    here.answered()
    here.click(".tabs [data-view=slots]")
    here.until(lambda: len(here.all(".slot.idle")) == 2)


def test_inside(here: Page) -> None:
    here.click(".tabs [data-view=inside]")
    here.one("#look-text").clear()
    here.one("#look-text").send_keys("the rain")
    here.click(".look .primary")
    here.until(lambda: here.all(".ribbon .written"))
    told = httpx.post(here.url + "/completion", json={"prompt": "the rain", "n_predict": 8, "n_probs": 1}, timeout=60).json()
    first = told["completion_probabilities"][0]
    assert len(here.all(".ribbon .written")) == 8
    assert here.one(".top .chosen code").get_attribute("textContent").strip("\u2423\u23ce") == first["token"].strip()
    cards = here.texts("#look-result .cards h2")
    assert cards == ["Hidden states", "Positions", "Mask", "KV cells and state rows", "Decode state"]
    variables = here.texts(".variables code")
    assert {"inp_tokens", "inp_pos", "kq_mask_0", "kv_idxs_0", "cache_k", "result_output"} <= set(variables)
    n = len(here.all("#look-result canvas"))
    assert n == 2 and len(here.all(".bars span")) == 2 + tiny.N_LAYER
    here.click("[aria-label='Next step']")
    assert "Step 2 of 8" in here.texts(".step-bar")[0]
    here.click(".layer:last-child")
    assert here.texts(".whole h3")[0].startswith(f"Layer {tiny.N_LAYER - 1}")
    nodes = here.run("return [...document.querySelectorAll('.graph .name')].map((e) => e.textContent)")
    assert {"attn_norm-1", "kqv-1", "ffn_out-1", "l_out-1"} <= set(nodes)
    here.run("document.querySelector('.graph .node').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert "rms_norm" in here.texts(".about")[0]


def test_inside_of_an_answer(here: Page) -> None:
    here.say("the rain")
    answer, = here.answered()
    here.click("[aria-label='Look inside this answer']")
    here.until(lambda: here.all(".ribbon .written"))
    written = here.run("return [...document.querySelectorAll('.written')].map((e) => [e.textContent, e.title])")
    assert all(title.endswith("given") for _, title in written)
    shown = "".join(text for text, _ in written)
    assert shown.translate({0x2423: " ", 0x23ce: "\n", 0xfffd: None})[:3] == answer.translate({0xfffd: None})[:3]


def test_light_and_dark(here: Page) -> None:
    colour = "return getComputedStyle(document.documentElement).backgroundColor"

    def wish(scheme: str) -> Any:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        here.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return here.run(colour)
    light, dark = wish("light"), wish("dark")
    assert light != dark
    here.click("#theme")                                                            # light, whatever the system wants
    assert here.run(colour) == light
    here.driver.refresh()
    assert here.run(colour) == light
    here.click("#theme")
    assert here.run(colour) == dark and wish("light") == dark
    here.click("#theme")
    assert here.run(colour) == light


@pytest.mark.parametrize("view", ["chat", "slots", "inside"])
def test_phone(here: Page, view: str) -> None:
    here.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True})
    here.open()
    here.one("#composer").send_keys("a word " + "that-is-longer-than-the-screen-is-wide" * 4)
    here.click("#send")
    here.answered()
    here.click(f".tabs [data-view={view}]")
    here.until(lambda: here.one(f"#view-{view}").is_displayed())
    assert here.run("return document.documentElement.scrollWidth") == 360
    wide = here.run("""return [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 361
        && !e.closest('pre, .table, .scrolls')).map((e) => e.outerHTML.slice(0, 200))""")
    assert not wide
    assert not here.one("#side").is_displayed()
    here.click("#side-open")
    here.until(lambda: here.one("#side").is_displayed())
    here.click("#conversations a")
    here.until(lambda: not here.one("#side").is_displayed())


def test_keys(here: Page) -> None:
    keys = "document.dispatchEvent(new KeyboardEvent('keydown', {bubbles: true, cancelable: true, ...arguments[0]}))"
    here.say("one")
    here.answered()
    here.one("#composer").send_keys("\ue013")                                       # arrow up: edit the last message
    assert here.one(".edit textarea").get_attribute("value") == "one"
    here.one(".edit textarea").send_keys("\ue00c")
    assert not here.all(".edit")
    press = keys.replace("document.", "document.body.")
    here.run(press, {"key": "?"})
    assert "Edit your last message" in here.one("dialog").text
    here.run("document.querySelector('dialog').close()")
    here.run(press, {"code": "Digit2", "key": "2", "altKey": True})
    here.until(lambda: here.one("#view-slots").is_displayed())
    here.run(press, {"code": "KeyO", "key": "O", "ctrlKey": True, "shiftKey": True})
    here.until(lambda: here.one("#view-chat").is_displayed() and not here.all(".message"))


def test_thoughts_are_folded(here: Page, long: Path) -> None:
    template = tiny.TEMPLATE + "{{ '<think>\n' }}"
    with running("-m", str(long), "-c", "1024", "--temp", "0", "--ignore-eos", "-n", "12", "--chat-template", template) as server:
        other = Page(here.driver, server.url)
        other.open()
        other.say("why")
        other.until(lambda: other.texts(".thought summary") == ["Thoughts"])
        assert not other.one(".thought .body").is_displayed()
        other.click(".thought summary")
        assert other.one(".thought .body").text


def test_the_key_is_asked_for(here: Page, long: Path) -> None:
    with running("-m", str(long), "-c", "1024", "--api-key", "secret", "-n", "4") as server:
        other = Page(here.driver, server.url)
        other.driver.get(server.url)
        other.one("#key").send_keys("wrong\n")
        other.until(lambda: "does not accept" in other.texts("dialog")[0])
        other.one("#key").send_keys("secret\n")
        other.until(lambda: other.texts("#model-name") == ["long.gguf"])
        other.driver.refresh()
        other.until(lambda: other.texts("#model-name") == ["long.gguf"])            # the browser keeps it
        other.say("hi")
        assert other.answered()[0]
        here.driver.get_log("browser")


@pytest.mark.slow
def test_a_real_model(here: Page) -> None:
    with running("-m", "smollm2", "-c", "2048", "--temp", "0", "--inspect", "-n", "48") as server:
        other = Page(here.driver, server.url)
        other.open()
        other.say("Write one sentence about the sea.")
        assert "sea" in other.answered()[0] or "ocean" in other.answered()[0]
        other.click("[aria-label='Look inside this answer']")
        other.until(lambda: other.all(".ribbon .written"))
        assert len(other.all(".bars span")) == 32 and len(other.all(".layer")) == 31
        other.click("[aria-label='Another text']")
        other.click(".look .primary")                           # the capital of France
        other.until(lambda: other.texts(".top .chosen code") == ["␣Paris"])


# --- Markdown


@pytest.fixture(scope="module")
def reader(driver: Any, url: str) -> Page:
    """A page that is opened once: these tests show nothing on it."""
    found = Page(driver, url)
    found.open()
    return found


RENDER = """const {render} = await import('/page/markdown.js'), box = document.createElement('div');
    render(box, arguments[0]); """
CASES = {
    "# A *b*\n\ntext **bold** `a<b`": "<h1>A <em>b</em></h1><p>text <strong>bold</strong> <code>a&lt;b</code></p>",
    "a\nb": "<p>a<br>b</p>",
    "- a\n- b\n  - c\n\n1. x\n2. y": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>x</li><li>y</li></ol>",
    "3. x\n\n4. y": '<ol start="3"><li><p>x</p></li><li><p>y</p></li></ol>',
    "> q\n> r": "<blockquote><p>q<br>r</p></blockquote>",
    "***both*** a_b_c ~~gone~~": "<p><em><strong>both</strong></em> a_b_c <del>gone</del></p>",
    "a * b * c **x": "<p>a * b * c **x</p>",
    r"\*no\* 1 < 2 && <b>": "<p>*no* 1 &lt; 2 &amp;&amp; &lt;b&gt;</p>",
    "---": "<hr>",
    "[l](https://x.org/a_(b))": '<p><a href="https://x.org/a_(b)" target="_blank" rel="noopener noreferrer nofollow">l</a></p>',
    "[l](javascript:alert(1))": '<p><span title="javascript:alert(1)">l</span></p>',
    "| a | b |\n|---|--:|\n| 1 | `x|y` |": '<div class="table" tabindex="0"><table><thead><tr><th class="left">a</th>'
    '<th class="right">b</th></tr></thead><tbody><tr><td class="left">1</td><td class="right"><code>x|y</code></td></tr></tbody>'
    '</table></div>',
}


@pytest.mark.parametrize("text", CASES)
def test_markdown(reader: Page, text: str) -> None:
    assert reader.module(RENDER + "return box.innerHTML", text) == CASES[text]


def test_code_can_be_copied_and_keeps_its_text(reader: Page) -> None:
    code = 'def f(x):  # "why"\n    return f"{x}" + 1.5\n\n\n<script>'
    found = "return [box.querySelector('pre').textContent, box.querySelectorAll('button').length, box.children.length]"
    assert reader.module(RENDER + found, f"```python\n{code}\n```") == [code, 1, 1]
    assert reader.module(RENDER + "return box.querySelector('pre').textContent", "```\nopen ") == "open "


def test_a_growing_text_ends_as_the_whole_one(reader: Page) -> None:
    text = "\n\n".join(CASES) + "\n\n```c\nint a;\n\nint b;\n```\nend"
    grown = reader.module(RENDER + """const other = document.createElement('div');
        for (let n = 1; n <= arguments[0].length; n++) render(other, arguments[0].slice(0, n));
        return [box.innerHTML, other.innerHTML]""", text)
    assert grown[0] == grown[1]


ATTACKS = [
    "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[a](JaVaScRiPt:alert(1))",
    "[a](data:text/html,<script>1</script>)",
    "![x](https://evil.example/p.png)", "[a]( javascript:alert(1))", "<https://x.example/\"onmouseover=alert(1)>",
    "[a](\x01javascript:alert(1))", "```\"><img src=x onerror=1>\ncode\n```", "| <img src=x> |\n|---|\n| <svg onload=1> |",
    "[<img src=x>](https://x.example)", "//evil.example",
]
BAD = """const loads = (e) => ['IMG', 'SCRIPT', 'IFRAME', 'STYLE', 'OBJECT'].includes(e.tagName);
    const runs = (a) => a.name.startsWith('on') || (a.name === 'href' && !/^(https?|mailto):/.test(a.value));
    return [...box.querySelectorAll('*')].filter((e) => loads(e) || [...e.attributes].some(runs)).map((e) => e.outerHTML)"""


def test_nothing_that_is_written_runs_or_loads(reader: Page) -> None:
    for text in [*ATTACKS, "\n\n".join(ATTACKS)]:
        assert reader.module(RENDER + BAD, text) == [], text


ODD = ["> " * 20000, "- " * 20000, "*a " * 20000, "_a* " * 20000, "[" * 40000, "`" * 40000 + "a", "a`" * 20000, "![" * 20000,
       "<" * 40000, "|" * 20000 + "\n" + "|-" * 10000, "**" * 20000, "```js\n" + "/*" * 9000, "# " + " " * 40000 + "x",
       "* " * 20000 + "x", "https://" * 5000, "- a" + "\n" * 40000 + "  b", "# a\n" * 30000, "[a](" * 10000]


@pytest.mark.parametrize("text", ODD, ids=lambda text: repr(text[:6]))
def test_odd_texts_are_no_trap(reader: Page, text: str) -> None:
    """A second or two on any machine; what takes the square of the length would take minutes."""
    took = reader.module("const start = performance.now(); " + RENDER + "return performance.now() - start", text)
    assert took < 10_000
