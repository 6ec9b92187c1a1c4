"""/ggraph/inspect: what happens inside of a request, beside the slots and as the slots do it."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.tools.server.conftest import running

BODY: dict[str, Any] = {"prompt": "the rain in the lane", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def client(file: str) -> Iterator[httpx.Client]:
    with running("-m", file, "-c", "512", "-np", "2", "--inspect", "--ignore-eos") as server, \
            httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def look(client: httpx.Client, **more: Any) -> dict[str, Any]:
    got = client.post("/ggraph/inspect", json={**BODY, **more})
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    return found


def test_the_same_tokens_and_probabilities_as_the_slots(client: httpx.Client) -> None:
    found = look(client)
    told = client.post("/completion", json={**BODY, "n_probs": 10}).json()["completion_probabilities"]
    assert [t["id"] for t in found["chosen"]] == [t["id"] for t in told]
    first = found["steps"][0]["outputs"][-1]["top"]
    assert [id for id, *_ in first] == [t["id"] for t in told[0]["top_logprobs"]]


def test_every_step_has_its_variables(client: httpx.Client) -> None:
    found = look(client)
    steps = found["steps"]
    n = found["n_prompt"]
    assert [len(s["tokens"]) for s in steps] == [n, 1, 1, 1] and len(found["chosen"]) == 4
    assert [t["pos"][0] for s in steps for t in s["tokens"]] == list(range(n + 3))
    assert [s["pools"][0]["used"] for s in steps] == [n, n + 1, n + 2, n + 3]
    assert [s["masks"][0]["rows"][0][-1].count("1") for s in steps] == [n, n + 1, n + 2, n + 3]
    for s in steps:
        assert {v["role"] for v in s["variables"]} == {"hidden", "positions", "mask", "memory", "decode"}
        assert [h["name"] for h in s["hidden"]] == ["inp_embd", *(f"l_out-{i}" for i in range(tiny.N_LAYER)), "result_norm"]
        assert all(h["rms"] > 0 for h in s["hidden"]) and all(node["us"] >= 0 for node in s["nodes"])
    graph = found["graphs"][steps[0]["graph"]]
    assert {"attn_norm-0", "kqv-1", "result_output"} <= {node["name"] for node in graph["nodes"]}


def test_a_given_answer_is_followed(client: httpx.Client) -> None:
    plain = look(client, max_tokens=3)["chosen"]
    found = look(client, answer="on", max_tokens=3)["chosen"]
    assert [(t["text"], t["given"]) for t in found[:2]] == [("on", True), (found[1]["text"], False)] and len(found) == 3
    assert found[0]["p"] < plain[0]["p"]                    # it is not what the model would have written


def test_a_conversation(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    found = client.post("/ggraph/inspect", json={"messages": messages, "max_tokens": 1}).json()
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    tokens = client.post("/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
    assert [t["id"] for t in found["steps"][0]["tokens"]] == tokens


def test_a_long_prompt_comes_in_chunks(client: httpx.Client) -> None:
    found = look(client, prompt="the rain " * 60, max_tokens=1)
    sizes = [len(s["tokens"]) for s in found["steps"]]
    assert len(sizes) > 1 and sum(sizes) == found["n_prompt"] and max(sizes) == 128
    assert [bool(s["outputs"]) for s in found["steps"]] == [False] * (len(sizes) - 1) + [True]
    assert all(s["hidden"] for s in found["steps"])


@pytest.mark.parametrize("body, status, said", [
    ({"prompt": "a " * 600}, 400, "exceeds"),
    ({"prompt": []}, 400, "empty"),
    ({}, 400, "'messages' is required"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "answer": 3}, 400, "answer"),
])
def test_what_is_wrong(client: httpx.Client, body: dict[str, Any], status: int, said: str) -> None:
    got = client.post("/ggraph/inspect", json=body)
    assert got.status_code == status and said in got.json()["error"]["message"]


def test_slots_stay_as_they_are(client: httpx.Client) -> None:
    client.post("/completion", json={"prompt": "the rain", "n_predict": 2})
    before = client.get("/slots").json()
    look(client)
    assert client.get("/slots").json() == before
    assert client.get("/ggraph/inspect").json() == {"max_prompt": 512, "max_steps": 32}


def test_it_is_off_unless_asked_for(file: str) -> None:
    with running("-m", file, "-c", "256") as server:
        for got in (httpx.get(server.url + "/ggraph/inspect"), httpx.post(server.url + "/ggraph/inspect", json=BODY)):
            assert got.status_code == 501 and "--inspect" in got.json()["error"]["message"]


def test_a_model_that_computes_nonsense(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "nan.gguf", llama__attention__layer_norm_rms_epsilon=float("nan"))
    with running("-m", str(path), "-c", "256", "--inspect") as server:
        got = httpx.post(server.url + "/ggraph/inspect", json=BODY, timeout=60)
        assert got.status_code == 400 and "NaN" in got.json()["error"]["message"]
        assert httpx.get(server.url + "/health").status_code == 200


def test_recurrent_layers_show_their_rows(tmp_path: Path) -> None:
    from tests import spec
    name = next(n for n in spec.specs() if n.startswith("mamba2"))
    path = spec.write(spec.specs()[name], tmp_path / "m.gguf")
    with running("-m", str(path), "-c", "256", "--inspect") as server:
        got = httpx.post(server.url + "/ggraph/inspect", json={"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}, timeout=60)
        assert got.status_code == 200, got.text
        assert all(s["states"]["dst"] for s in got.json()["steps"]) and not got.json()["steps"][0]["pools"]
