"""The page in a real browser, against a real server: what a person does with it."""
from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.tools.server.browser import Page
from tests.tools.server.conftest import running


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
