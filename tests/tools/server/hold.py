"""Load that must leave a server as it was: many clients, half of whom leave, and what its process has in memory.

In: the url of a server, prompts. Out: answers by prompt, and figures. The same for any server with llama-server's API.
"""
from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

Prompt = str | list[int]


async def complete(c: httpx.AsyncClient, prompt: Prompt, n_predict: int, stream: bool, **more: Any) -> tuple[str, list[int]]:
    """Text and tokens of an answer at temperature 0."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "stream": stream, "return_tokens": True, **more}
    r = await c.post("/completion", json=body)
    assert r.status_code == 200, r.text
    parts = [r.json()] if not stream else [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: ")]
    return "".join(p["content"] for p in parts), [t for p in parts for t in p["tokens"]]


def isolation(url: str, prompts: Sequence[Prompt], n_predict: int, at_once: int = 16,
              seed: int = 5) -> list[tuple[str, list[int]] | None]:
    """The answers; None for those half of the clients that left before theirs came, each at a moment of its own."""
    rng = random.Random(seed)
    took: list[float] = [0.1]

    async def one(c: httpx.AsyncClient, gate: asyncio.Semaphore, i: int) -> tuple[str, list[int]] | None:
        async with gate:
            patience = rng.random() * 1.2 * statistics.median(took[-50:]) if i % 2 else None
            start = time.perf_counter()
            try:
                answer = await asyncio.wait_for(complete(c, prompts[i], n_predict, i % 3 == 0), patience)
            except (asyncio.TimeoutError, TimeoutError):
                return None
            took.append(time.perf_counter() - start)
            return answer

    async def run() -> list[tuple[str, list[int]] | None]:
        gate = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=2 * at_once)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as c:
            return await asyncio.gather(*(one(c, gate, i) for i in range(len(prompts))))
    return asyncio.run(run())


def lone(url: str, prompts: Sequence[Prompt], n_predict: int) -> list[tuple[str, list[int]]]:
    """One after the other, each from an empty slot."""
    async def run() -> list[tuple[str, list[int]]]:
        async with httpx.AsyncClient(base_url=url, timeout=600) as c:
            return [await complete(c, p, n_predict, False, cache_prompt=False) for p in prompts]
    return asyncio.run(run())


def soak(url: str, pid: int, n: int, at_once: int = 8, seed: int = 9) -> tuple[Counter[str], list[float]]:
    """Short requests of all kinds, every third one aborted: how each ended, and the server's resident MiB along the way."""
    rng = random.Random(seed)
    sizes: list[float] = []
    ends: Counter[str] = Counter()

    def request() -> tuple[str, dict[str, Any]]:
        words = " ".join(rng.choice(("rain", "wind", "snow", "the", "cat")) for _ in range(rng.randrange(1, 30)))
        chat = {"messages": [{"role": "user", "content": words}], "max_tokens": rng.randrange(1, 12)}
        return rng.choice((
            ("/completion", {"prompt": words, "n_predict": rng.randrange(12), "n_probs": rng.choice((0, 2))}),
            ("/v1/completions", {"prompt": words, "max_tokens": 6, "n": rng.choice((1, 2)), "echo": rng.random() < 0.2,
                                 "logprobs": 1}),
            ("/v1/chat/completions", {**chat, "temperature": 1.0}),
            ("/v1/chat/completions", {**chat, "max_tokens": 30, "response_format": {"type": "json_object"}}),
            ("/completion", {"prompt": words, "n_predict": 8, "grammar": 'root ::= ("a" | "b")+'}),
            ("/v1/messages", {**chat, "max_tokens": 5}), ("/tokenize", {"content": words}), ("/completion", {"prompt": []})))

    async def one(c: httpx.AsyncClient, gate: asyncio.Semaphore, i: int) -> None:
        async with gate:
            path, body = request()
            body["stream"] = rng.random() < 0.5
            try:
                r = await asyncio.wait_for(c.post(path, json=body), rng.random() * 0.1 if i % 3 == 0 else None)
                ends[str(r.status_code) if r.status_code < 500 else f"{r.status_code} {path} {r.text[:200]}"] += 1
            except (asyncio.TimeoutError, TimeoutError):
                ends["aborted"] += 1
            if i % 10 == 0:
                sizes.append(resident(pid))

    async def run() -> None:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=600) as c:
            await asyncio.gather(*(one(c, gate, i) for i in range(n)))
    asyncio.run(run())
    return ends, sizes


def resident(pid: int) -> float:
    """MiB"""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def settled(url: str, seconds: float = 20) -> list[dict[str, Any]]:
    """The slots, once none of them is busy; AssertionError if that does not come."""
    deadline = time.monotonic() + seconds
    while True:
        slots: list[dict[str, Any]] = httpx.get(f"{url}/slots").json()
        if not any(s["is_processing"] for s in slots):
            return slots
        assert time.monotonic() < deadline, slots
        time.sleep(0.05)
