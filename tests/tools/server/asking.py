"""How tests ask a server: bodies to begin with, answers that are checked to be answers."""
from __future__ import annotations

import json
import time
from typing import Any

import httpx

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the rain"}], "temperature": 0, "max_tokens": 8}


def post(client: httpx.Client, path: str, code: int = 200, **body: Any) -> Any:
    r = client.post(path, json=body)
    assert r.status_code == code, r.text
    if code != 200:
        error = r.json()["error"]
        assert error["code"] == code and error["message"] and error["type"]
        return error
    return r.json()


def frames(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    r = client.post(path, json={**body, "stream": True})
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream"), r.text
    lines = [line[6:] for line in r.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def idle(client: httpx.Client) -> bool:
    return not any(s["is_processing"] for s in client.get("/slots").json())


def soon(what: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)
