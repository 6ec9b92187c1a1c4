"""Speculative decoding and chunk reuse over HTTP: flags, timings, what /slots and /metrics say."""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from ggraph.tools.server import command
from tests import nextn, spec
from tests.tools.server import hold
from tests.tools.server.asking import GREEDY, post
from tests.tools.server.conftest import Server, running
from tests.tools.server.test_command import parsed


def test_over_http(file: str, client: httpx.Client) -> None:
    prompt = "the rain in the rain in the rain in "
    body: dict[str, Any] = {"prompt": prompt, **GREEDY, "n_predict": 40}
    plain = post(client, "/completion", **body)
    assert "draft_n" not in plain["timings"] and plain["generation_settings"]["speculative.types"] == "none"
    args = ["--spec-type", "ngram-simple,draft-simple", "-md", file, "--spec-draft-n-max", "5", "--spec-ngram-simple-size-n", "3",
            "--spec-ngram-simple-size-m", "6", "--cache-reuse", "8", "-cram", "0"]
    with running("-m", file, "-c", "512", "-np", "2", "--metrics", *args) as server, httpx.Client(base_url=server.url) as c:
        answer = post(c, "/completion", **body)
        assert answer["content"] == plain["content"]
        assert answer["timings"]["draft_n"] >= answer["timings"]["draft_n_accepted"] > 10
        assert answer["generation_settings"]["speculative.types"] == "ngram-simple,draft-simple"
        assert all(s["speculative"] for s in c.get("/slots").json())
        metrics = c.get("/metrics").text
        assert f"spec_decode_num_draft_tokens_total {answer['timings']['draft_n']}.0" in metrics
        assert 'spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in metrics
        grammar = {**body, "grammar": 'root ::= ("rain " | "wind ")+ "."', "temperature": 1, "seed": 5}
        assert post(c, "/completion", **grammar)["content"] == post(client, "/completion", **grammar)["content"]
        head, middle, tail = "the cat on a mat " * 3, "in the wind " * 4, "and snow in the air " * 3
        post(c, "/completion", prompt=head + middle + tail, id_slot=0, **GREEDY)
        reused = post(c, "/completion", prompt=head + tail, id_slot=0, **GREEDY)["timings"]["cache_n"]
        assert "moved" in c.get("/slots").json()[0]["cache_reuse"]
        post(c, "/completion", prompt=head + middle + tail, id_slot=0, n_cache_reuse=0, **GREEDY)
        assert post(c, "/completion", prompt=head + tail, id_slot=0, n_cache_reuse=0, **GREEDY)["timings"]["cache_n"] < reused


@pytest.mark.parametrize("name", ["glm4moe-moe", pytest.param("qwen35-dense-b", marks=pytest.mark.slow)])
def test_the_models_own_block(name: str, tmp_path: Path) -> None:
    """Several texts at once, some of whose clients leave: those that stay are those of plain decoding."""
    file = str(spec.write(nextn.speaking(name), tmp_path / "m.gguf"))
    rng = random.Random(6)
    prompts = ["".join(rng.choice("etaoin shr") for _ in range(rng.randrange(2, 50))) for _ in range(20)]
    body: dict[str, Any] = {"prompt": prompts[0], **GREEDY, "n_predict": 16, "return_tokens": True}
    with running("-m", file, "-c", "1024", "-np", "4", "-ub", "32", "--metrics", "--spec-type", "draft-mtp") as server, \
            httpx.Client(base_url=server.url, timeout=60) as c:
        got = hold.isolation(server.url, prompts, 16, at_once=8)
        slots = hold.settled(server.url)
        assert all(s["speculative"] for s in slots)
        answer = post(c, "/completion", **body)
        assert answer["timings"]["draft_n"] >= answer["timings"]["draft_n_accepted"] >= 0 and answer["timings"]["draft_n"] > 10
        assert answer["generation_settings"]["speculative.types"] == "draft-mtp"
        two = post(c, "/completion", **body, n=2)
        assert [a["tokens"] for a in two] == [answer["tokens"]] * 2
        assert "spec_decode_num_drafts_total" in c.get("/metrics").text
    with running("-m", file, "-c", "1024", "-np", "4", "-ub", "32") as server:
        want = hold.lone(server.url, prompts, 16)
        assert [g for g in got if g] == [w for g, w in zip(got, want) if g] and sum(g is not None for g in got) >= 10
        assert answer["tokens"] == want[0][1]


def test_a_model_without_such_a_block(file: str) -> None:
    server = Server("-m", file, "--spec-type", "draft-mtp")
    assert server.process.wait(30) == 1
    server._reader.join(5)
    assert any("holds no block" in line for line in server.log)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parsed(monkeypatch, "--spec-type", "draft-simple, ngram-simple", "-md", "x.gguf", "-ngld", "0", "-ctkd", "q8_0", "-td", "1",
               "--cache-reuse", "256", "-ctxcp", "4", "-cms", "512", LLAMA_ARG_SPEC_DRAFT_N_MAX="7")
    assert (p["spec_type"], p["spec_draft_n_max"], p["cache_reuse"]) == ("draft-simple,ngram-simple", 7, 256)
    assert (p["n_checkpoints"], p["checkpoint_step"], p["spec_draft_type_k"]) == (4, 512, "q8_0")
    assert p["options"].spec_types == ["draft-simple", "ngram-simple"]
    assert parsed(monkeypatch, LLAMA_ARG_SPEC_TYPE="none")["options"].spec_types == []


@pytest.mark.parametrize("args, said", [
    (["--spec-type", "draft-simple"], "needs a draft model"),
    (["--spec-type", "ngram-simple,guess"], "'guess' is not one of"),
])
def test_what_is_wrong(args: list[str], said: str) -> None:
    result = CliRunner().invoke(command.main, args)
    assert result.exit_code == 2 and said in result.output
