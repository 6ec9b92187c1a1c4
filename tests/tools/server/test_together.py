"""Many clients at once, and those who leave."""
from __future__ import annotations

import asyncio
import importlib
import json
import random
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.tools.server.asking import idle, post, soon
from tests.tools.server.conftest import Server


def test_isolation(server: Server, client: httpx.Client) -> None:
    """16 at a time, half of them leave: those who stay get what they get alone, and all slots are free at the end."""
    rng = random.Random(5)
    prompts = ["".join(rng.choice("etaoinshr ") for _ in range(rng.randrange(3, 80))) for _ in range(60)]

    async def one(c: httpx.AsyncClient, i: int, patience: float | None) -> str | None:
        body = {"prompt": prompts[i], "n_predict": 10, "temperature": 0, "stream": i % 3 == 0}
        try:
            r = await asyncio.wait_for(c.post("/completion", json=body), patience)
        except (asyncio.TimeoutError, TimeoutError):
            return None
        if not body["stream"]:
            return str(r.json()["content"])
        return "".join(json.loads(line[6:])["content"] for line in r.text.splitlines() if line.startswith("data: "))

    async def all_of_them() -> list[str | None]:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as c:
            async def go(i: int) -> str | None:
                async with gate:
                    return await one(c, i, rng.random() * 0.3 if i % 2 else None)
            return await asyncio.gather(*(go(i) for i in range(len(prompts))))
    got = asyncio.run(all_of_them())
    soon(lambda: idle(client))
    for prompt, text in zip(prompts, got):
        if text is not None:
            assert text == post(client, "/completion", prompt=prompt, n_predict=10, temperature=0, cache_prompt=False)["content"]
    assert sum(t is not None for t in got) >= 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server: Server, client: httpx.Client, stream: bool) -> None:
    body = json.dumps({"prompt": "the rain", "n_predict": 500, "ignore_eos": True, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        soon(lambda: not idle(client))
    soon(lambda: idle(client), 2)


def test_health_during_a_prefill(server: Server, client: httpx.Client) -> None:
    async def busy() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as c:
            bodies = [{"prompt": "rain " * 80 + str(i), "n_predict": 1} for i in range(8)]
            work = [asyncio.create_task(c.post("/completion", json=body)) for body in bodies]
            worst = 0.0
            while not all(t.done() for t in work):
                start = time.perf_counter()
                assert (await c.get("/health")).status_code == 200
                worst = max(worst, time.perf_counter() - start)
            return worst
    assert asyncio.run(busy()) < 0.5


def test_the_load_benchmark(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                            tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    load = importlib.import_module("load")
    args = ["--url", server.url, "--peer-url", server.url, "--clients", "1,3", "--n-prompt", "20", "--n-predict", "4",
            "--n-vocab", "290", "--n-long", "200", "--out", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr("sys.argv", ["load.py", *args])
    load.main()
    said = capsys.readouterr().out
    assert said.count("ratio") == 2 and said.count("no request waits while a slot is idle: ") == 2
    assert said.count("they grow by at most one ubatch: ") == 2
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["n_predict"] == 4 for row in rows) and rows[0]["tokens_per_second"] > 0
