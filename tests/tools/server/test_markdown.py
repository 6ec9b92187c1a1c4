"""What the page makes of Markdown: the right elements, and nothing that runs or loads."""
from __future__ import annotations

from typing import Any

import pytest

from tests.tools.server.browser import Page


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
