"""ggraph-run: completion, chat, flags, JSON, and every way in which it can go wrong."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph.tools._options import unescape
from ggraph.tools.run import main
from tests import adapters, spec, tiny

GREEDY = ("-c", "256", "--temp", "0")
COMMAND = [sys.executable, "-W", "error", "-m", "ggraph.tools.run"]


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("run") / "tiny.gguf"))


def run(*args: str, text: str | None = None, code: int = 0, **environ: str) -> Result:
    result = CliRunner().invoke(main, args, input=text, env=environ)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    return result


# --- completion


def test_completion(file: str) -> None:
    r = run("-m", file, *GREEDY, "-n", "5", "the rain")
    with ggraph.LLM(file, n_ctx=256) as llm:
        text = llm.generate("the rain", max_tokens=5, temperature=0.0).read()
    assert r.stdout == f"the rain{text}\n"
    assert run("-m", file, *GREEDY, "-n", "5", "-p", "the rain").stdout == r.stdout
    assert run("-m", file, *GREEDY, "-n", "5", "-p", "the rain", "--no-display-prompt").stdout == f"{text}\n"


def test_what_is_said_at_load_and_at_the_end(file: str) -> None:
    err = run("-m", file, *GREEDY, "-n", "5", "the rain", "-s", "42").stderr
    n_kv = 2 * tiny.N_LAYER * tiny.N_HEAD_KV * tiny.HEAD * 256 * 2
    assert f"KV cache {n_kv / 2**20:.2f} MiB: 2 layers x 256 cells, K F16, V F16" in err
    for line in (r"model tiny\.gguf: llama, 0\.10 M parameters", r"weights 0\.38 MiB", r"compute arena \d",
                 r"backend \w+: \d+ threads", "seed 42", r"load time = +\d",
                 r"prompt eval time = .* / +8 tokens \(.* ms per token, .* tokens per second\)",
                 r" eval time = .* / +4 runs"):
        assert re.search(line, err), line
    assert run("-q", "-m", file, *GREEDY, "-n", "5", "the rain").stderr == ""


def test_json(file: str) -> None:
    out = json.loads(run("-m", file, "-c", "256", "-n", "5", "--seed", "3", "--json", "the rain").stdout)
    assert (len(out["tokens"]), out["finish_reason"], out["seed"], out["prompt_tokens"]) == (5, "length", 3, 8)
    assert out["timings"]["predicted_n"] == 4 and out["timings"]["prompt_n"] == 8
    again = json.loads(run("-m", file, "-c", "256", "-n", "5", "--seed", "3", "--json", "the rain").stdout)
    assert (again["text"], again["tokens"]) == (out["text"], out["tokens"])
    fresh = [json.loads(run("-m", file, "-c", "256", "-n", "1", "--json", "a").stdout)["seed"] for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_reverse_prompt_and_escapes(file: str) -> None:
    whole = json.loads(run("-m", file, *GREEDY, "-n", "20", "--json", "the rain").stdout)["text"]
    out = json.loads(run("-m", file, *GREEDY, "-n", "20", "--json", "-r", whole[5:8], "the rain").stdout)
    assert (out["text"], out["stopping_word"]) == (whole[:whole.index(whole[5:8])], whole[5:8])
    plain, raw = (json.loads(run("-m", file, *GREEDY, "-n", "0", "--json", *e, r"the\nrain").stdout) for e in ((), ("-no-e",)))
    assert raw["prompt_tokens"] == plain["prompt_tokens"] + 1


def test_unescape() -> None:
    assert unescape(r"a\n\t\r\\\"\'\x41\q\xZZ\xe2\x82\xac\ ") == "a\n\t\r\\\"'A\\q\\xZZ€\\ "


def test_prompt_from_a_file_or_standard_input(file: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the rain\n")
    want = run("-m", file, *GREEDY, "-n", "3", "the rain").stdout
    assert run("-m", file, *GREEDY, "-n", "3", "-f", str(tmp_path / "p.txt")).stdout == want
    assert run("-m", file, *GREEDY, "-n", "3", "-f", "-", text="the rain").stdout == want


def test_verbose_prompt(file: str) -> None:
    result = run("-m", file, *GREEDY, "-n", "1", "--verbose-prompt", "ae")
    err = result.stderr
    assert result.output.index("number of tokens") < result.output.index("\nae"), "on lines of its own"
    assert "number of tokens in prompt = 3\n" in err
    assert [f"{tiny.TOKENS.index(t):6d} -> {t.replace('▁', ' ')!r}" for t in ("<s>", "▁a", "e")] \
        == [line for line in err.splitlines() if " -> " in line]


def test_every_flag_reaches_its_place(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    context, sampler = ggraph.Context.__init__, ggraph.LLM.sampler
    monkeypatch.setattr(ggraph.Context, "__init__", lambda self, model, **kw: (made.update(kw), context(self, model, **kw))[1])
    monkeypatch.setattr(ggraph.LLM, "sampler", lambda self, **kw: (made.update(kw), sampler(self, **kw))[1])
    flags = {
        "top_k": "3", "top_p": "0.5", "min_p": "0.1", "typical": "0.9", "xtc_probability": "0.1", "xtc_threshold": "0.2",
        "repeat_last_n": "7", "repeat_penalty": "1.5", "presence_penalty": "0.25", "frequency_penalty": "0.75",
        "dry_multiplier": "0.5", "dry_base": "2.0", "dry_allowed_length": "3", "dry_penalty_last_n": "9", "dynatemp_range": "0.5",
        "dynatemp_exp": "1.5", "adaptive_target": "0.5", "adaptive_decay": "0.8", "mirostat_lr": "0.2", "mirostat_ent": "4.0",
        "top_nsigma": "1.5", "temperature": "0.6", "seed": "11"}
    run("-m", file, "-c", "300", "-b", "64", "-ub", "32", "-t", "1", "-tb", "2", "-ctk", "q8_0", "-ctv", "f32", "-fa", "on",
        "-no-kvu", "--no-graph-reuse", "--swa-full", "--rope-scaling", "yarn", "--rope-scale", "2", "--yarn-orig-ctx", "128",
        "--rope-freq-base", "9000", "--sampler-seq", "kt", "-l", "5+1.5", "-l", "6-inf", "--ignore-eos",
        "--dry-sequence-breaker", r"\n", "-n", "2", "a",
        *(part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), value)))
    want: dict[str, Any] = {
        "n_ctx": 300, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 2, "type_k": "q8_0", "type_v": "f32",
        "flash_attn": "on", "kv_unified": False, "graph_reuse": False, "swa_full": True, "ignore_eos": True,
        "rope": {"scaling": "yarn", "scale": 2.0, "yarn_orig_ctx": 128, "freq_base": 9000.0},
        "samplers": "top_k;temperature", "logit_bias": {5: 1.5, 6: float("-inf")}, "dry_breakers": ["\n"]}
    names = {"top_nsigma": "top_n_sigma", "temperature": "temp"}
    want |= {names.get(name, name): type(ggraph.LLM.SAMPLING[names.get(name, name)])(value) for name, value in flags.items()}
    assert {name: made[name] for name in want} == want


def test_what_is_not_given_stays_open(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the file's own defaults hold."""
    made: dict[str, Any] = {}
    sampler = ggraph.LLM.sampler
    monkeypatch.setattr(ggraph.LLM, "sampler", lambda self, **kw: (made.update(kw), sampler(self, **kw))[1])
    run("-m", file, "-n", "1", "a")
    assert set(ggraph.LLM.SAMPLING) - set(made) == {"min_keep"}       # which no flag gives
    assert [name for name, value in made.items() if value is not None and name in ggraph.LLM.SAMPLING] == ["seed"]


def test_override_kv(file: str) -> None:
    err = run("-m", file, "--override-kv", "llama.context_length=int:256,llama.x=str:y", "-n", "1", "a").stderr
    assert "n_ctx 256" in err
    plain, bare = (json.loads(run("-m", file, *GREEDY, "-n", "0", "--json", "a", *more).stdout) for more in
                   ((), ("--override-kv", "tokenizer.ggml.add_bos_token=bool:false")))
    assert bare["prompt_tokens"] == plain["prompt_tokens"] - 1


def test_adapters(file: str, tmp_path: Path) -> None:
    base, rng = "blk.0.ffn_down.weight", np.random.RandomState(3)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, tiny.N_FF), (tiny.N_EMBD, 2)))
    lora = adapters.write_lora(tmp_path / "lora.gguf", "llama", {base: (a, b)}, 2.0)
    vector = adapters.write_vector(tmp_path / "vector.gguf", {1: rng.standard_normal(tiny.N_EMBD).astype(np.float32)})
    using = [(ggraph.Adapter(lora), 0.5), (ggraph.Adapter(vector, layer_range=(1, 1)), 4.0)]
    with ggraph.LLM(file, n_ctx=256) as llm:
        plain = llm.generate("the rain", max_tokens=8, temperature=0.0).read()
        llm.ctx.set_adapters(using)
        text = llm.generate("the rain", max_tokens=8, temperature=0.0).read()         # nothing of the first text is reused
    assert text != plain
    args = "-m", file, *GREEDY, "-n", "8", "the rain", "--no-display-prompt"
    assert run(*args).stdout == f"{plain}\n"
    assert run(*args, "--lora-scaled", f"{lora}:0.5", "--control-vector-scaled", f"{vector}:4",
               "--control-vector-layer-range", "1", "1").stdout == f"{text}\n"
    assert run(*args, "--lora", f"{lora},{lora}", "--control-vector", str(vector)).stdout
    assert "is a LoRA; a layer range" in run(*args, "--control-vector", str(lora), "--control-vector-layer-range", "1", "1",
                                             code=1).stderr


def test_context_full_and_shift(file: str) -> None:
    out = run("-m", file, *GREEDY, "--ignore-eos", "--json", "a")
    assert json.loads(out.stdout)["stop_type"] == "context"
    assert "the context of 256 tokens is full" in out.stderr
    out = run("-m", file, *GREEDY, "--ignore-eos", "--json", "--context-shift", "-n", "300", "a")
    assert len(json.loads(out.stdout)["tokens"]) == 300


def test_help_is_grouped() -> None:
    out = run("--help").stdout
    places = [out.index(f"\n{name}:") for name in
              ("Prompt and length", "Model", "Chat", "Context and speed", "Sampling", "Positions", "Output", "Other")]
    assert places == sorted(places)
    assert "-ctk, --cache-type-k" in out and "x>=" not in out
    assert ggraph.__version__ in run("--version").stdout


# --- chat without a terminal


def test_single_turn(file: str) -> None:
    r = run("-m", file, *GREEDY, "-n", "4", "-st", "-p", "the rain", "-sys", "in an air", "--verbose-prompt")
    with ggraph.LLM(file, n_ctx=256) as llm:
        messages = [{"role": "system", "content": "in an air"}, {"role": "user", "content": "the rain"}]
        assert r.stdout == llm.chat(messages, max_tokens=4, temperature=0.0).read() + "\n"
    assert run("-m", file, *GREEDY, "-n", "4", "-st", "-sys", "in an air", text="the rain\nmore\n").stdout == r.stdout


def test_chat_from_a_pipe(file: str) -> None:
    """Each line a message; the second sees the first and its answer."""
    lines = run("-m", file, *GREEDY, "-n", "3", "--json", text="the rain\n\nan\\\nair\n").stdout.splitlines()
    first, second = map(json.loads, lines)
    with ggraph.LLM(file, n_ctx=256) as llm:
        history = [{"role": "user", "content": "the rain"}, {"role": "assistant", "content": first["text"]},
                   {"role": "user", "content": "an\nair"}]
        g = llm.chat(history, max_tokens=3, temperature=0.0)
        assert second["text"] == g.read()
        assert second["prompt_tokens"] == len(g.prompt)
    assert second["seed"] == first["seed"] + 1
    assert second["timings"]["cache_n"] > 0


def test_commands(file: str, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/regen", "the rain", f"/save {saved}", "/regen", "/clear", f"/load {saved}", "/what", "/help", "/save", "/load",
             "/exit", "a"]
    r = run("-m", file, *GREEDY, "-n", "3", text="\n".join(lines))
    answers = r.stdout.splitlines()
    assert "there is no answer yet" in r.stderr and "there is no command /what" in r.stderr
    assert "/regen " in r.stderr and "say where to" in r.stderr and "say where from" in r.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert "".join(answers).count(messages[1]["content"].strip()) == 2
    assert "loaded 2 messages" in r.stderr
    assert os.listdir(tmp_path) == ["chat.json"]


def test_saving_where_no_folder_is(file: str, tmp_path: Path) -> None:
    for name, said in (tmp_path / "no" / "c.json", "there is no folder"), (tmp_path, "is a folder"):
        assert said in run("-m", file, *GREEDY, "-n", "1", text=f"a\n/save {name}", code=1).stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["[]", "{}", "x", '{"messages": [{"role": "user"}]}', '{"messages": 3}'])
def test_loading_what_is_no_conversation(file: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    r = run("-m", file, *GREEDY, text=f"/load {tmp_path / 'c.json'}\n", code=1)
    assert "is no saved conversation" in r.stderr


def test_template_of_ones_own(file: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}{{ x }}")
    out = [json.loads(run("-m", file, *GREEDY, "-n", "1", "-st", "--json", "-p", "a", *args).stdout)["prompt_tokens"]
           for args in (["--chat-template", "{{ messages[-1].content }}"],
                        ["--chat-template-file", str(tmp_path / "t.jinja"), "--chat-template-kwargs", '{"x": "e"}'])]
    assert out[1] == out[0] + 1


# --- what goes wrong


def broken(tmp_path: Path, what: str) -> Path:
    path = tmp_path / "m.gguf"
    s = tiny.tiny(general__architecture="nonesuch" if what == "architecture" else "llama")
    if what == "missing":
        s["tensors"] = [t for t in s["tensors"] if t[0] != "blk.1.ffn_up.weight"]
    if what == "unknown":
        s["tensors"].append(["blk.0.attn_magic.weight", [64, 64], "F32"])
    spec.write(s, path)
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:200_000])
    if what == "page":
        path.write_text("<!DOCTYPE html><html></html>" * 10)
    return path


@pytest.mark.parametrize(("what", "said"), [
    ("architecture", "architecture 'nonesuch' is not known; known ones: .*llama"), ("missing", r"blk\.1\.ffn_up\.weight"),
    ("unknown", r"blk\.0\.attn_magic\.weight"), ("truncated", "beyond|cut|truncated|end"), ("page", "HTML|html")])
def test_bad_files(tmp_path: Path, what: str, said: str) -> None:
    err = run("-m", str(broken(tmp_path, what)), "a", code=1).stderr
    assert re.search(said, err) and err.startswith("error: ") and err.count("\n") == 1


def test_no_such_file() -> None:
    assert "no file nowhere.gguf" in run("-m", "nowhere.gguf", "a", code=1).stderr


def test_prompt_longer_than_the_context(file: str) -> None:
    err = run("-m", file, *GREEDY, "the rain " * 100, code=1).stderr
    assert re.search(r"the prompt has \d{3} tokens, the context holds 256", err)


def test_no_chat_template(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", tokenizer__chat_template=None)
    assert "m.gguf has no chat template" in run("-m", str(path), code=1).stderr


def test_a_template_that_refuses(file: str) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in run("-m", file, *GREEDY, "-st", "-p", "a", "--chat-template", template, code=1).stderr


@pytest.mark.parametrize("args", [
    ["-c", "many"], ["-c", "-1"], ["-ub", "0"], ["-n", "-3"], ["-ctk", "q9"], ["-fa", "maybe"], ["--nonesuch"], ["-s", "-2"],
    ["--temp", "hot"], ["--temp", "nan"], ["--samplers", "top_k;best"], ["--sampler-seq", "kz"], ["--mirostat", "3"],
    ["-l", "5"], ["-l", "9999+1"], ["-l", "x+1"], ["--override-kv", "a=b"], ["--override-kv", "a=int:x"],
    ["--chat-template-kwargs", "{"], ["--chat-template-kwargs", "[1]"], ["-f", "nowhere.txt"], ["-p", "b"],
    ["--rope-scale", "-1"], ["--rope-freq-base", "nan"], ["--yarn-beta-fast", "inf"], ["two"],
    ["--samplers", "top_k", "--sampler-seq", "k"],
    ["--lora-scaled", "a.gguf"], ["--lora-scaled", "a.gguf:b"], ["--control-vector-layer-range", "0", "1"]])
def test_bad_flags(file: str, args: list[str]) -> None:
    assert run("-m", file, "a", *args, code=2).stderr


def test_a_bad_flag_is_told_in_few_words(file: str) -> None:
    assert "'x' is not a valid integer." in run("-m", file, "a", "-n", "x", code=2).stderr
    said = run("-m", file, "a", "--temp", "nan", code=2)
    assert "T must be a finite number, not 'nan', in 'temp_ext T DELTA EXPONENT'" in said.stderr and "mirostat" not in said.stderr


def test_an_error_begins_a_line_and_is_not_the_command_lines_fault(file: str) -> None:
    bad = run("-m", file, *GREEDY, "a", "--override-kv", "llama.attention.layer_norm_rms_epsilon=float:nan", code=1)
    assert bad.stdout == "a\n" and "error: the logit of token 0 is nan" in bad.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams_are_as_dev_null(file: str, closed: str) -> None:
    command = " ".join([*COMMAND, "-m", file, *GREEDY, "-n", "2", "-st" if closed == "<&-" else "a", closed])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "rror" not in done.stderr
    assert bool(done.stdout.strip()) == (closed == "2>&-")


def test_nothing_to_continue(file: str) -> None:
    assert "there must be a prompt" in run("-m", file, "-no-cnv", code=2).stderr


def test_prompt_file_that_is_no_text(file: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"abc\xff")
    assert "is not UTF-8 text" in run("-m", file, "-f", str(tmp_path / "p.txt"), code=1).stderr


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    err = run("-m", "smollm2", "a", code=1, GGRAPH_CACHE=str(tmp_path / "file" / "cache")).stderr
    assert "cannot make the cache folder" in err and "set GGRAPH_CACHE" in err


def test_bad_environment(file: str) -> None:
    assert "GGRAPH_BACKEND=tpu is not known" in run("-m", file, "a", code=1, GGRAPH_BACKEND="tpu").stderr
    assert "GGRAPH_DEBUG=yes is not known" in run("-m", file, "a", code=1, GGRAPH_DEBUG="yes").stderr


def test_a_traceback_where_asked_for(file: str) -> None:
    result = CliRunner().invoke(main, ["-m", "nowhere.gguf", "a"], env={"GGRAPH_DEBUG": "1"})
    assert isinstance(result.exception, ggraph.Error)


def test_a_defect_is_told_in_one_line(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggraph.LLM, "generate", lambda *a, **kw: 1 / 0)
    err = run("-m", file, *GREEDY, "a", code=1).stderr
    assert "error: unexpected ZeroDivisionError" in err and "GGRAPH_DEBUG=1" in err
