"""The server itself: what it tells of itself, files of slots, keys, slow clients, signals, the log."""
from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tools.server.asking import GREEDY, idle, post, soon
from tests.tools.server.conftest import Server, running


def test_what_it_says_of_itself(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]
    assert model["id"] == "tiny" and model["meta"]["n_vocab"] > 256
    props = client.get("/props").json()
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 512
    assert "im_start" in props["chat_template"]
    assert [s["id"] for s in client.get("/slots").json()] == [0, 1, 2, 3]
    assert client.get("/lora-adapters").json() == []
    metrics = client.get("/metrics").text
    assert "# TYPE llamacpp:prompt_tokens_total counter" in metrics and "llamacpp:requests_processing 0.0" in metrics
    paths = client.get("/openapi.json").json()["paths"]
    assert "prompt" in paths["/completion"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]


def test_slot_files(client: httpx.Client, slots_folder: Path) -> None:
    first = post(client, "/completion", prompt="the rain in spain", id_slot=1, **GREEDY)
    saved = post(client, "/slots/1?action=save", filename="s.bin")
    assert saved["n_saved"] == first["tokens_cached"] and saved["n_written"] == (slots_folder / "s.bin").stat().st_size
    assert post(client, "/slots/1?action=erase")["n_erased"] == saved["n_saved"]
    (slots_folder / "folder").mkdir()
    for action in ("save", "restore"):
        wrong = post(client, f"/slots/1?action={action}", 400, filename="folder")["message"]
        assert "directory" in wrong and str(slots_folder) not in wrong
    assert post(client, "/slots/2?action=restore", filename="s.bin")["n_restored"] == saved["n_saved"]
    again = post(client, "/completion", prompt="the rain in spain", id_slot=2, **GREEDY)
    assert again["content"] == first["content"] and again["timings"]["cache_n"] == again["tokens_evaluated"] - 1


def test_cors(client: httpx.Client) -> None:
    page = {"Origin": "http://localhost:3000", "Access-Control-Request-Headers": "authorization"}
    r = client.options("/v1/chat/completions", headers=page)
    assert r.status_code == 200 and r.headers["access-control-allow-origin"] == page["Origin"]
    assert r.headers["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "http://evil.example"}).headers


def test_keys_and_signals(file: str) -> None:
    """Only who has the key comes in; the first signal lets requests end, the second leaves at once."""
    with running("-m", file, "-c", "256", "-np", "1", "--api-key", "one,two") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        assert c.get("/health").status_code == 200 and c.options("/completion").status_code == 200
        for headers in ({}, {"Authorization": "Bearer three"}):
            r = c.post("/tokenize", json={}, headers=headers)
            assert r.status_code == 401 and r.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer one"}, {"Authorization": "bearer one"}, {"X-Api-Key": "two"}):
            assert c.post("/tokenize", json={}, headers=headers).status_code == 200
        with c.stream("POST", "/completion", headers={"X-Api-Key": "two"},
                      json={"prompt": "a", "n_predict": 200, "stream": True, "ignore_eos": True}) as r:
            stream = r.iter_lines()
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            lines = [line for line in stream if line.startswith("data: ")]
        assert json.loads(lines[-1][6:])["stop"]
        assert server.process.wait(20) == 0


def test_requests_that_do_not_end_in_time(file: str) -> None:
    """After the signal each stream and each answer ends with an error, and the server in good order."""
    body = {"prompt": "a", "n_predict": -1, "ignore_eos": True}
    with running("-m", file, "-c", "400", "-np", "2", "--context-shift") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c, stalled(server.url, as_sent("/completion", body)) as whole, \
            c.stream("POST", "/completion", json={**body, "stream": True}) as r:
        stream = r.iter_lines()
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        lines = [line for line in stream if line.startswith("data: ")]
        assert json.loads(lines[-1][6:])["error"] == {"code": 503, "message": "the server is stopping", "type": "unavailable_error"}
        assert whole.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert server.process.wait(20) == 0
        server._reader.join(5)
        assert not [line for line in server.log if "Traceback" in line or "Error" in line], server.log


def test_a_slow_client_and_the_log(file: str) -> None:
    """Who does not send its request in time is told so; a line for each request names no prompt."""
    with running("-m", file, "-c", "256", "-np", "1", "--timeout", "1", "--log-requests") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as s:
            s.sendall(b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": ')
            assert b" 408 " in s.recv(4096).splitlines()[0]
        post(c, "/completion", prompt="secret", n_predict=1)
        soon(lambda: any("POST /completion 200" in line for line in server.log))
        assert not any("secret" in line for line in server.log)


def stalled(url: str, sent: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.settimeout(20)
    s.connect((host, int(port)))
    s.sendall(sent)
    return s


def as_sent(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw)


def test_clients_that_stall(file: str) -> None:
    """In the head of a request, in that of a second one, and instead of reading a stream: their connections are closed."""
    with running("-m", file, "-c", "512", "-np", "1", "--timeout", "1") as server, httpx.Client(base_url=server.url) as c:
        for head in (b"", b"POST /completion HTTP/1.1\r\nHo", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"):
            with stalled(server.url, head) as s:
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while part := s.recv(4096):
                        answer += part
                assert (b"200 OK" in answer) == head.startswith(b"GET")
        body = {"prompt": "a", "n_predict": 250, "ignore_eos": True, "stream": True, "n_probs": 280}
        with stalled(server.url, as_sent("/completion", body)) as s:
            soon(lambda: not idle(c))
            time.sleep(0.2)
            soon(lambda: idle(c))
            with pytest.raises(OSError):
                for _ in range(100):
                    s.sendall(b"x" * 1000)
                    time.sleep(0.05)
        assert post(c, "/completion", prompt="a", n_predict=1)["tokens_predicted"] == 1


def test_verbose(file: str) -> None:
    with running("-m", file, "-c", "256", "-np", "1", "-v") as server, httpx.Client(base_url=server.url) as c:
        for _ in range(2):
            post(c, "/completion", prompt="the rain in an air", n_predict=1)
        for said in ("slot was empty", "tokens kept", "POST /completion 200"):
            soon(lambda said=said: any(said in line for line in server.log))


def test_a_second_signal(file: str) -> None:
    with running("-m", file, "-c", "256", "-np", "1", "--context-shift") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c, \
            c.stream("POST", "/completion", json={"prompt": "a", "n_predict": -1, "stream": True, "ignore_eos": True}) as r:
        next(r.iter_lines())
        server.process.send_signal(signal.SIGINT)
        soon(lambda: any("stopping" in line for line in server.log))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(3) == 128 + signal.SIGINT


def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    server = Server("-m", str(tmp_path / "bad.gguf"))
    assert server.process.wait(30) == 1
    server._reader.join(5)
    assert any("bad.gguf" in line for line in server.log)
