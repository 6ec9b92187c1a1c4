"""The files of the page at /, and their headers."""
from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from ggraph.tools.server import page
from ggraph.tools.server.app import make_app
from ggraph.tools.server.service import Options


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
