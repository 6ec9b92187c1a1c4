"""Servers of other kinds: embeddings, reranking, LoRA adapters."""
from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import adapters, encoders, spec
from tests.tools.server.asking import GREEDY, post
from tests.tools.server.conftest import running


def test_embeddings(file: str) -> None:
    with running("-m", file, "-c", "256", "--embeddings", "--pooling", "mean") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        answer = post(c, "/v1/embeddings", input=["the rain", "a cat"])
        assert [d["index"] for d in answer["data"]] == [0, 1] and answer["usage"]["prompt_tokens"] > 0
        assert sum(x * x for x in answer["data"][0]["embedding"]) == pytest.approx(1, abs=1e-5)
        short = post(c, "/v1/embeddings", input="the rain", dimensions=5)["data"][0]["embedding"]
        scale = sum(x * x for x in answer["data"][0]["embedding"][:5]) ** 0.5
        assert short == pytest.approx([x / scale for x in answer["data"][0]["embedding"][:5]], abs=1e-5)
        assert "between 1 <= value <= 64" in post(c, "/v1/embeddings", 400, input="the rain", dimensions=65)["message"]
        native = post(c, "/embeddings", input="the rain")
        assert native[0]["embedding"][0] == answer["data"][0]["embedding"]
        assert "too large to process" in post(c, "/v1/embeddings", 400, input="x" * 300)["message"]
        assert post(c, "/completion", 501, prompt="a")["type"] == "not_supported_error"


def test_reranking(tmp_path: Path) -> None:
    bert = encoders.SPECS["bert"]
    tokens = ["<unk>", "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}", *"abcdefghijklmnopqrstuvwxyz"]
    tokens += [f"<pad{i}>" for i in range(encoders.N_VOCAB - len(tokens))]
    kv = [row for row in bert["kv"] if not row[0].startswith("tokenizer.ggml")] + [
        ["tokenizer.ggml.token_type_count", "UINT32", 2], ["tokenizer.ggml.model", "STRING", "llama"],
        ["tokenizer.ggml.tokens", "ARRAY:STRING", tokens], ["tokenizer.ggml.bos_token_id", "UINT32", 1],
        ["tokenizer.ggml.eos_token_id", "UINT32", 2], ["tokenizer.ggml.add_eos_token", "BOOL", True],
        ["tokenizer.ggml.scores", "ARRAY:FLOAT32", [0.0] * len(tokens)],
        ["tokenizer.ggml.token_type", "ARRAY:INT32", [2, 3, 3, *[1] * (len(tokens) - 3)]]]
    file = spec.write({**bert, "kv": kv}, tmp_path / "bert.gguf")
    with running("-m", str(file), "--reranking") as server, httpx.Client(base_url=server.url, timeout=30) as c:
        documents = ["rain", "wind and snow", "sun"]
        answer = post(c, "/rerank", query="rain", documents=documents)
        scores = [r["relevance_score"] for r in answer["results"]]
        assert sorted(r["index"] for r in answer["results"]) == [0, 1, 2] and scores == sorted(scores, reverse=True)
        assert len(set(scores)) == 3 and answer["usage"]["prompt_tokens"] > 10
        best = post(c, "/v1/rerank", query="rain", documents=[{"text": d} for d in documents], top_n=1)["results"]
        assert best == answer["results"][:1]
        told = post(c, "/rerank", query="rain", texts=documents, return_text=True)
        assert [t["score"] for t in told] == scores and told[0]["text"] == documents[told[0]["index"]]
        assert "query" in post(c, "/rerank", 400, documents=documents)["message"]
        assert "non-empty" in post(c, "/rerank", 400, query="a", documents=[])["message"]


def test_lora_adapters(tmp_path: Path) -> None:
    """Scales change between requests, and what was cached with the old ones is not used."""
    model, loras = adapters.write(tmp_path, "llama-dense")
    ask = {"prompt": list(range(1, 60)), "return_tokens": True, **GREEDY}
    with running("-m", str(model), "-c", "256", "-np", "1", "--lora", str(loras[0])) as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        loaded = c.get("/lora-adapters").json()
        assert [(a["id"], a["scale"], Path(a["path"]).name) for a in loaded] == [(0, 1.0, loras[0].name)]
        on = post(c, "/completion", **ask)["tokens"]
        assert c.post("/lora-adapters", json=[{"id": 0, "scale": 0.0}]).json() == {"success": True}
        off = post(c, "/completion", **ask)
        assert off["tokens"] != on and off["timings"]["cache_n"] == 0
        assert c.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).json() == {"success": True}
        assert post(c, "/completion", **ask)["tokens"] == on
        wrong: list[Any] = [[{"id": 1, "scale": 1}], [{"id": 0}], {}, [0]]
        for bad in wrong:
            assert c.post("/lora-adapters", json=bad).status_code == 400
            assert not isinstance(bad, list) or post(c, "/completion", 400, **ask, lora=bad)


def test_requests_with_loras_of_their_own(tmp_path: Path) -> None:
    """Each at its own scale, at the same time: answers are those of requests alone, and caches are not mixed."""
    model, loras = adapters.write(tmp_path, "llama-dense")
    prompt = list(range(1, 90))
    bodies = [{"prompt": [*prompt, i], "return_tokens": True, **GREEDY, "n_predict": 24, "lora": lora}
              for i in range(3) for lora in ([], [{"id": 0, "scale": 1.0}], [{"id": 0, "scale": 3.0}], [{"id": 0, "scale": 0.0}])]
    with running("-m", str(model), "-c", "1024", "-np", "4", "-ub", "32", "--lora", str(loras[0])) as server:
        async def together() -> list[Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as c:
                return [r.json() for r in await asyncio.gather(*(c.post("/completion", json=b) for b in bodies))]
        found = [a["tokens"] for a in asyncio.run(together())]
        with httpx.Client(base_url=server.url, timeout=60) as c:
            alone = [post(c, "/completion", **b, cache_prompt=False)["tokens"] for b in bodies]
            assert found == alone and len({tuple(tokens) for tokens in found[:4]}) == 3 and found[0] == found[1]
            again = [post(c, "/completion", **b) for b in bodies]
            assert [a["tokens"] for a in again] == alone and any(a["timings"]["cache_n"] > 80 for a in again)
            assert c.get("/lora-adapters").json()[0]["scale"] == 1.0
            assert again[2]["generation_settings"]["lora"] == [{"id": 0, "scale": 3.0}]
