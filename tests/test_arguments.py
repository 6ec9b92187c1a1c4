"""Arguments of a wrong type or value are told at the boundary, by name; and no public function is left out of this."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggraph
from ggraph import Batch, Context, Grammar, Hook, Model, Sampler, Vocab
from ggraph.generate import History
from ggraph.gguf import File
from ggraph.memory import Memory
from tests import tiny

NAN = float("nan")
KINDS: dict[str, list[Any]] = {             # what none of them may be
    "int": ["x", 1.5, [1], None],
    "int?": ["x", 1.5, [1]],
    "count": ["x", 1.5, None, -1],
    "number": ["x", [1], NAN, None],
    "number?": ["x", [1], NAN],
    "real": ["x", [1], None],
    "flag": ["no", 5, None, [1]],
    "text": [5, b"x", None, ["x"]],
    "path": [5, b"x", None, ["x"], "a\0b"],
    "ids": [5, None, ["a"], [1.5]],
    "texts": [5, [5], None],
    "names?": [5, "x", [1], {5: 1}],
    "function": [5, "x", None],
    "function?": [5, "x"],
    "object": [5, "x", None, object()],
    "object?": [5, "x", object()],
    "seq": ["x", 1.5, None],
    "layers": ["x", 1.5, None, -2, [1]],
    "word": [5, "nonesuch", ["x"]],
    "list": [5, None, object()],
    "list?": [5, "x", {"a": 1}],
}
World = Any


class Row(NamedTuple):
    """A call with one wrong argument at a time: argument -> kind, or kind and how the message names it."""
    call: Callable[..., object]
    arguments: dict[str, str | tuple[str, str]]


CONTEXT: dict[str, str | tuple[str, str]] = {
    "n_ctx": "count", "n_batch": "count", "n_ubatch": "count", "n_seq_max": "count", "kv_unified": "flag", "type_k": "word",
    "type_v": "word", "flash_attn": "word", "swa_full": "flag"}
REST: dict[str, str | tuple[str, str]] = {
    "n_threads": "int?", "n_threads_batch": "int?", "embeddings": "flag", "pooling": "word", "rope": "names?",
    "offload_kqv": "flag", "graph_reuse": "flag", "n_rollback": "count", "mtp": "flag", "encoder": "flag", "adapters": "list",
    "on_node": "object?", "on_step": "function?", "progress": "function?"}
SEQ: tuple[str, str] = ("int", "a sequence")
RANGE: dict[str, str | tuple[str, str]] = {"seq": SEQ, "p0": "int", "p1": "int"}
CALLS: dict[str, Row] = {
    "Adapter": Row(lambda w, path="none.gguf", **kw: ggraph.Adapter(path, **kw), {"path": "path", "layer_range": "list?"}),
    "Batch.add": Row(lambda w, **kw: Batch().add(**{"token": 1, "pos": 0, "seq_id": 0, **kw}),
                     {"token": "int", "pos": ("int?", "pos|token 0"), "seq_id": "seq", "output": "flag",
                      "embd": ("object?", "embedding 0")}),
    "Batch.add_embd": Row(lambda w, **kw: Batch().add_embd(**{"vector": [1.0], "pos": 0, "seq_id": 0, **kw}),
                          {"vector": ("object", "embedding 0"), "pos": ("int?", "pos|token 0"), "seq_id": "seq", "output": "flag"}),
    "ChatTemplate": Row(lambda w, source="x", **kw: ggraph.ChatTemplate(source, **kw),
                        {"source": "text", "bos_token": "text", "eos_token": "text"}),
    "ChatTemplate.render": Row(lambda w, messages=(), **kw: w.llm.chat_template.render(messages, **kw),
                               {"messages": "list", "tools": "list?", "add_generation_prompt": "flag"}),
    "Context": Row(lambda w, **kw: Context(**{"model": w.llm.model, "n_ctx": 256, **kw}), CONTEXT | REST | {"model": "object"}),
    "Context.process": Row(lambda w, kind="decode", batch=None, **kw: w.ctx.process(kind, batch),
                           {"kind": ("word", "a batch is processed as"), "batch": "object"}),
    "Context.follow": Row(lambda w, follower: w.ctx.follow(follower), {"follower": "function"}),
    "Context.graph": Row(lambda w, embd: w.ctx.graph(embd), {"embd": "flag"}),
    "Context.plan": Row(lambda w, graph: w.ctx.plan(graph), {"graph": "object"}),
    "Context.set_adapters": Row(lambda w, adapters: w.ctx.set_adapters(adapters), {"adapters": "list"}),
    "Context.state_save": Row(lambda w, path="x", seq=None: w.ctx.state_save(path, seq), {"path": "path", "seq": ("int?", SEQ[1])}),
    "Context.state_load": Row(lambda w, **kw: w.ctx.state_load(**{"path": w.saved, **kw}),
        {"path": "path", "seq": ("int?", SEQ[1])}),
    "Context.state_get": Row(lambda w, seq: w.ctx.state_get(seq), {"seq": ("int?", SEQ[1])}),
    "Context.state_set": Row(lambda w, **kw: w.ctx.state_set(**{"state": w.ctx.state_get(), **kw}),
                             {"state": "names?", "seq": ("int?", "the state|sequence")}),
    "Memory.seq_rm": Row(lambda w, **kw: w.ctx.memory.seq_rm(**{"seq": 0, **kw}), RANGE),
    "Memory.seq_cp": Row(lambda w, **kw: w.ctx.memory.seq_cp(**{"src": 0, "dst": 0, **kw}),
                         {"src": SEQ, "dst": SEQ, "p0": "int", "p1": "int"}),
    "Memory.seq_keep": Row(lambda w, seq: w.ctx.memory.seq_keep(seq), {"seq": SEQ}),
    "Memory.seq_add": Row(lambda w, **kw: w.ctx.memory.seq_add(**{"seq": 0, "p0": 0, "p1": 1, "delta": 0, **kw}),
                          RANGE | {"delta": "int"}),
    "Memory.seq_div": Row(lambda w, **kw: w.ctx.memory.seq_div(**{"seq": 0, "p0": 0, "p1": 1, "d": 1, **kw}), RANGE | {"d": "int"}),
    "Memory.seq_pos_min": Row(lambda w, seq: w.ctx.memory.seq_pos_min(seq), {"seq": SEQ}),
    "Memory.seq_pos_max": Row(lambda w, seq: w.ctx.memory.seq_pos_max(seq), {"seq": SEQ}),
    "Memory.seq_same": Row(lambda w, a=0, b=0: w.ctx.memory.seq_same(a, b), {"a": ("int?", SEQ[1]), "b": ("int?", SEQ[1])}),
    "Memory.state": Row(lambda w, seq: w.ctx.memory.state(seq), {"seq": ("int?", SEQ[1])}),
    "EachAlone": Row(lambda w, drafters: ggraph.EachAlone(drafters), {"drafters": "list"}),
    "FirstOf": Row(lambda w, guessers: ggraph.FirstOf(guessers), {"guessers": "list"}),
    "Embedder": Row(lambda w, ctx: ggraph.Embedder(ctx), {"ctx": "object"}),
    "Embedder.submit": Row(lambda w, ids: w.embedder.submit(ids), {"ids": "ids"}),
    "Engine": Row(lambda w, **kw: ggraph.Engine(**{"ctx": w.ctx, "vocab": w.llm.vocab, **kw}),
                  {"ctx": "object", "vocab": "object", "context_shift": "flag", "cache_bytes": "count", "cache_reuse": "count",
                   "n_checkpoints": "count", "checkpoint_step": "count", "guesser": "object?", "n_draft": "count"}),
    "Engine.submit": Row(lambda w, request: w.engine.submit(request), {"request": "object"}),
    "Engine.cancel": Row(lambda w, request: w.engine.cancel(request), {"request": "object"}),
    "Engine.call": Row(lambda w, function: w.engine.call(function), {"function": "function"}),
    "Engine.set_adapters": Row(lambda w, adapters: w.engine.set_adapters(adapters).result(), {"adapters": "list"}),
    "Request": Row(lambda w, **kw: w.engine.submit(ggraph.Request(
        **{"prompt": [1], "samplers": [Sampler("greedy", tiny.N_VOCAB)], "sink": print, **kw})),
        {"prompt": "ids", "samplers": "list", "sink": "function", "max_tokens": "int", "stop": "texts", "logprobs": "int?",
         "prompt_logprobs": "int?", "preserved": "list", "cache_prompt": "flag", "cache_reuse": "int", "adapters": "list?",
         "slot": "int", "n_keep": "int", "n_discard": "count", "n_indent": "count", "time_limit": "number",
         "progress": "flag", "timings": "flag", "post_sampling": "flag"}),
    "Grammar.gbnf": Row(lambda w, **kw: Grammar.gbnf(**{"vocab": w.llm.vocab, "source": 'root ::= "a"', **kw}),
                        {"vocab": "object", "source": "text"}),
    "Grammar.lark": Row(lambda w, **kw: Grammar.lark(**{"vocab": w.llm.vocab, "source": 'start: "a"', **kw}),
                        {"vocab": "object", "source": "text"}),
    "Grammar.json_schema": Row(lambda w, **kw: Grammar.json_schema(**{"vocab": w.llm.vocab, "schema": {}, **kw}),
                               {"vocab": "object", "schema": "object"}),
    "Grammar.regex": Row(lambda w, **kw: Grammar.regex(**{"vocab": w.llm.vocab, "pattern": "a", **kw}),
                         {"vocab": "object", "pattern": "text"}),
    "Grammar.accepts": Row(lambda w, token: Grammar.regex(w.llm.vocab, "a").accepts(token), {"token": "int"}),
    "Grammar.accept": Row(lambda w, token: Grammar.regex(w.llm.vocab, "a").accept(token), {"token": "int"}),
    "Hook": Row(lambda w, match="x", fn=print: Hook(match, fn), {"match": ("list", "match"), "fn": "function"}),
    "LLM": Row(lambda w, model="none.gguf", **kw: ggraph.LLM(model, **kw), {"model": "path", "chat_template": "object?"}),
    "LLM.generate": Row(lambda w, prompt="the", **kw: w.llm.generate(prompt, **kw),
                        {"prompt": "ids", "max_tokens": "int", "stop": "texts", "logprobs": "int?", "special": "flag",
                         "context_shift": "flag", "n_keep": "int", "progress": "function?", "draft": "object?", "n_branch": "int",
                         "sampler": "object?"}),
    "LLM.generate, drafting": Row(lambda w, n_draft: w.llm.generate("the", draft="ngram", n_draft=n_draft), {"n_draft": "int"}),
    "LLM.chat": Row(lambda w, messages=(), **kw: w.llm.chat(messages, **kw),
                    {"messages": "list", "tools": "list?", "template_kwargs": "names?"}),
    "LLM.render": Row(lambda w, messages=(), **kw: w.llm.render(messages, **kw), {"messages": "list", "tools": "list?"}),
    "LLM.sampler": Row(lambda w, **kw: w.llm.sampler(**kw),
                       {"temperature": "number?", "ignore_eos": "flag", "grammar": "object?", "dry_breakers": "texts"}),
    "LLM.score": Row(lambda w, text="the", **kw: w.llm.score(text, **kw), {"text": "ids", "progress": "function?"}),
    "LLM.embed": Row(lambda w, texts=("a",), **kw: w.llm.embed(texts, **kw),
        {"texts": "texts", "pooling": "word", "normalize": "flag"}),
    "Model": Row(lambda w, **kw: Model(w.path, **kw),
                 {"n_gpu_layers": "layers", "override_tensor": "names?", "kv_overrides": "names?", "repack": "word",
                  "backend": "word", "device": "word"}),
    "Model, its path": Row(lambda w, path: Model(path), {"path": ("path", "the model")}),
    "ModelDraft": Row(lambda w, **kw: ggraph.ModelDraft(**{"ctx": w.ctx, **kw}),
        {"ctx": "object", "n_min": "int", "p_min": "number"}),
    "ModelGuesser": Row(lambda w, **kw: ggraph.ModelGuesser(**{"ctx": w.ctx, **kw}),
                        {"ctx": "object", "n_min": "int", "p_min": "number"}),
    "ModelGuesser.check": Row(lambda w, ctx: ggraph.ModelGuesser(w.ctx).check(ctx), {"ctx": "object"}),
    "MtpDraft": Row(lambda w, nextn=None, **kw: ggraph.MtpDraft(nextn, **kw),
                    {"nextn": "object", "seq": "int", "n_min": "int", "p_min": "number"}),
    "Nextn": Row(lambda w, ctx: ggraph.Nextn(ctx), {"ctx": "object"}),
    "NgramDraft": Row(lambda w, **kw: ggraph.NgramDraft(**kw), {"size_n": "count", "size_m": "count", "least": "count"}),
    "ReasoningBudget": Row(
        lambda w, **kw: ggraph.ReasoningBudget(**{"vocab": w.llm.vocab, "start": "a", "ends": ["b"], "budget": 1, **kw}),
        {"vocab": "object", "start": "text", "ends": "texts", "budget": "int", "message": "text", "opened": "flag",
         "inner": "object?"}),
    "ReasoningBudget.accepts": Row(lambda w, token: ggraph.ReasoningBudget(w.llm.vocab, "a", ["b"], 0, opened=True).accepts(token),
                                   {"token": "int"}),
    "ReasoningBudget.accept": Row(lambda w, token: ggraph.ReasoningBudget(w.llm.vocab, "a", ["b"], 0).accept(token),
                                  {"token": "int"}),
    "Sampler": Row(lambda w, **kw: Sampler(**{"chain": "greedy", "n_vocab": 5, **kw}),
                   {"chain": "text", "n_vocab": "count", "vocab": "object?", "grammar": "object?", "dry_breakers": "texts"}),
    "Sampler.sample": Row(lambda w, logits: Sampler("greedy", 5).sample(logits), {"logits": "object"}),
    "Sampler.drawn": Row(lambda w, n_top: w.sampled.drawn(n_top), {"n_top": "count"}),
    "Sampler.accept": Row(lambda w, token=1, **kw: Sampler("greedy", 5).accept(token, **kw), {"token": "int", "generated": "flag"}),
    "Vocab": Row(lambda w, source=None, **kw: Vocab(w.path if "kv_overrides" in kw else source, **kw),
                 {"source": "path", "kv_overrides": "names?"}),
    "Vocab.encode": Row(lambda w, text="the", **kw: w.llm.vocab.encode(text, **kw),
                        {"text": "text", "add_special": "flag", "parse_special": "flag"}),
    "Vocab.decode": Row(lambda w, ids=(1,), **kw: w.llm.vocab.decode(ids, **kw), {"ids": ("ids", "ids?"), "special": "flag"}),
    "Vocab.decode_bytes": Row(lambda w, ids=(1,), **kw: w.llm.vocab.decode_bytes(ids, **kw),
        {"ids": ("ids", "ids?"), "special": "flag"}),
    "Vocab.piece": Row(lambda w, id=1, **kw: w.llm.vocab.piece(id, **kw), {"id": "int", "special": "flag"}),
    "Vocab.stream_decoder": Row(lambda w, special: w.llm.vocab.stream_decoder(special), {"special": "flag"}),
    "Vocab.text": Row(lambda w, id: w.llm.vocab.text(id), {"id": "int"}),
    "Vocab.is_eog": Row(lambda w, id: w.llm.vocab.is_eog(id), {"id": "int"}),
    "Vocab.is_control": Row(lambda w, id: w.llm.vocab.is_control(id), {"id": "int"}),
    "audit": Row(lambda w, file: ggraph.audit(file), {"file": "object"}),
    "default_chain": Row(lambda w, **kw: ggraph.default_chain(**kw),
                         {"temp": "real", "top_k": "real", "samplers": "text", "logit_bias": "list", "mirostat": "word",
                          "seed": "real"}),
    "memory_needed": Row(lambda w, **kw: ggraph.memory_needed(**{"model": w.llm.model, "n_ctx": 256, **kw}),
        CONTEXT | {"model": "object"}),
    "sampling_defaults": Row(lambda w, model: ggraph.sampling_defaults(model), {"model": "object"}),
}
# Not called from outside: by whom instead; records, which nobody makes but the one who hands them out.
INSIDE = {
    "Adapter.check": "Context", "Model.place": "Context", "Model.enter": "Context", "Model.leave": "Context",
    "Model.retreat": "Context",
    "Context.draw": "Generation", "Hook.accepts": "Context", "ModelDraft.check": "Generation",
    "ModelDraft.propose": "Generation", "ModelDraft.branches": "Generation", "ModelGuesser.propose": "Engine",
    "EachAlone.propose": "Engine", "FirstOf.propose": "Engine", "MtpDraft.propose": "Generation", "MtpDraft.branches": "Generation",
    "Nextn.follow": "Context", "Nextn.copy": "Memory", "Nextn.back": "MtpDraft", "Nextn.logits": "MtpDraft",
    "NgramDraft.propose": "Generation", "NgramDraft.branches": "Generation", "Generation": "LLM.generate",
    "Grammar": "Grammar.gbnf",
    "Grammar.as_read": "Grammar.json_schema",
    "Request.tell": "Engine", "Request.check": "Engine", "Memory": "Context", "Memory.prepare": "Context",
    "Memory.apply": "Context",
    "Memory.restore": "Context.state_set", "Memory.forget": "Context.state_set", "Done": "", "Failed": "", "Finding": "",
    "Observed": "", "Observed.nbytes": "", "Observed.traffic": "",
    "Piece": "", "Progress": "", "Times": "", "TokenLogprob": "", "LLM, its context": ""}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with ggraph.LLM(path, n_ctx=256) as llm, Context(llm.model, n_ctx=256) as ctx, Context(llm.model, n_ctx=256) as served, \
            Context(llm.model, n_ctx=256, embeddings=True, pooling="mean") as embedding:
        engine, embedder, sampled = ggraph.Engine(served, llm.vocab), ggraph.Embedder(embedding), Sampler("dist 1", 5)
        sampled.sample(np.zeros(5))
        ctx.state_save(path.parent / "state")
        yield SimpleNamespace(path=path, llm=llm, ctx=ctx, saved=path.parent / "state", engine=engine, embedder=embedder,
                              sampled=sampled)
        engine.close()
        embedder.close()


CASES = [(name, argument, value) for name, row in CALLS.items() for argument, kind in row.arguments.items()
         for value in KINDS[kind if isinstance(kind, str) else kind[0]]]


@pytest.mark.parametrize(("name", "argument", "value"), CASES, ids=lambda x: repr(x)[:30])
def test_a_wrong_argument_is_told_by_name(name: str, argument: str, value: Any, world: World) -> None:
    row = CALLS[name]
    kind = row.arguments[argument]
    told = argument if isinstance(kind, str) else kind[1]
    with pytest.raises((ggraph.Error, ValueError), match=f"(?i){told}") as e:
        row.call(world, **{argument: value})
    assert len(str(e.value)) < 1000


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Public functions, classes and methods that take arguments."""
    for name in [*ggraph.__all__, "Memory"]:
        value = Memory if name == "Memory" else getattr(ggraph, name)
        if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        yield name, value
        for method, raw in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(raw, "__func__", raw)
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", getattr(value, method) if isinstance(raw, classmethod) else function


def test_no_public_argument_is_left_out() -> None:
    covered = {name.partition(",")[0]: set[str]() for name in CALLS}
    for name, row in CALLS.items():
        covered[name.partition(",")[0]] |= row.arguments.keys()
    found = dict(functions())
    assert not covered.keys() - found.keys() and not {n for n in INSIDE if "," not in n} - found.keys()
    for name, function in found.items():
        parameters = inspect.signature(function).parameters.values()
        wanted = {p.name for p in parameters if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if name not in INSIDE:
            assert wanted <= covered.get(name, set()), f"{name}: {sorted(wanted - covered.get(name, set()))} need a row here"


OTHERS: dict[str, Callable[[World], object]] = {
    "seq_id is None": lambda w: Batch().add(1, 0, None),                            # type: ignore[arg-type]
    "rope option scale is 'x'": lambda w: Context(w.llm.model, rope={"scale": "x"}),
    "rope option scaling is 'x'": lambda w: Context(w.llm.model, rope={"scaling": "x"}),
    "unknown rope option 'x'": lambda w: Context(w.llm.model, rope={"x": 1}),
    "not a row of numbers": lambda w: Sampler("greedy", n_vocab=5).sample("abc"),   # type: ignore[arg-type]
    "a token of the prompt is 'a'": lambda w: w.llm.generate(["a"]),
    "a stop string is 5": lambda w: w.llm.generate("the", stop=[5]),
    "failed to parse grammar": lambda w: Grammar.gbnf(w.llm.vocab, "x"),
    "at most 4096": lambda w: Context(w.llm.model, n_seq_max=10**9),
    "MiB": lambda w: Context(w.llm.model, n_ctx=10**12),
    "n_threads is 1000": lambda w: Context(w.llm.model, n_threads=1000),
    "nothing was sampled": lambda w: Sampler("greedy", 5).drawn(),
    r"the token 999999; the vocabulary has": lambda w: CALLS["Request"].call(w, prompt=[999999]),
    r"override_tensor has the pattern '\['": lambda w: Model(w.path, override_tensor={"[": "CPU"}),
    r"override_tensor\['a'\] is 5": lambda w: Model(w.path, override_tensor={"a": 5}),      # type: ignore[dict-item]
    "logit_bias": lambda w: w.llm.sampler(logit_bias={"a": 1}),
    "the path of the GGUF file is 5": lambda w: File(5),                            # type: ignore[arg-type]
}


@pytest.mark.parametrize("told", OTHERS)
def test_what_else_makes_no_sense_is_told(told: str, world: World) -> None:
    with pytest.raises(ggraph.Error, match=told):
        OTHERS[told](world)


EXTREME = st.sampled_from([-2**70, -2**31, -5, -1, 0, 1, 3, 7, 2**31 - 1, 2**31, 2**63, 2**70])


@pytest.fixture(scope="module")
def memories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Context]]:
    folder = tmp_path_factory.mktemp("memories")
    models = [Model(tiny.write(folder / "tiny.gguf")), Model(tiny.write_hybrid(folder / "hybrid.gguf"))]
    yield [Context(model, n_ctx=256, n_seq_max=2, kv_unified=unified) for model in models for unified in (True, False)]
    for model in models:
        model.close()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), st.lists(st.tuples(st.sampled_from(["seq_rm", "seq_cp", "seq_add", "seq_div", "seq_keep"]),
                                             st.sampled_from([-1, 0, 1, 2, 2**70]), EXTREME, EXTREME, EXTREME), max_size=4))
def test_any_numbers_are_done_or_refused(memories: list[Context], i: int, calls: list[tuple[str, int, int, int, int]]) -> None:
    ctx = memories[i]
    ctx.memory.clear()
    batch = Batch()
    for pos in range(6):
        batch.add(5 + pos, pos, 0)
    ctx.process("decode", batch)
    for name, seq, p0, p1, delta in calls:
        rest = {"seq_rm": (p0, p1), "seq_cp": (1, p0, p1), "seq_keep": ()}.get(name, (p0, p1, delta))
        with suppress(ggraph.BatchError):
            assert getattr(ctx.memory, name)(seq, *rest) in (True, False, None)
    for seq in (0, 1):
        last = ctx.memory.seq_pos_max(seq)
        assert -1 <= ctx.memory.seq_pos_min(seq) <= last < 2**31
        ctx.state_set(ctx.state_get(seq), seq)
        assert ctx.memory.seq_pos_max(seq) == last


def test_a_wrong_type_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match="chain is 5; it must be"):
        Sampler(5, n_vocab=5)                                                       # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(world: World) -> None:
    ids = np.array([1, 20, 30])
    assert world.llm.vocab.decode(ids) == world.llm.vocab.decode([1, 20, 30])
    assert world.llm.generate(ids, max_tokens=np.int64(2), temperature=np.float32(0)).read()
    with Context(world.llm.model, n_ctx=np.int32(256), embeddings=np.bool_(False)) as ctx:      # type: ignore[arg-type]
        assert History(ctx).reuse([1, 2]) == 0


def test_a_wrong_argument_leaves_the_engine_to_others(world: World, tmp_path: Path) -> None:
    told: list[Any] = []
    good = ggraph.Request([1, 20], [Sampler("greedy", tiny.N_VOCAB)], told.append, max_tokens=3)
    for bad in ({"prompt": [10**6]}, {"adapters": [5]}, {"samplers": ["x"]}):
        with pytest.raises(ggraph.Error):
            CALLS["Request"].call(world, **bad)
    world.engine.submit(good)
    world.engine.call(lambda: None).result()
    while not any(isinstance(event, ggraph.Done | ggraph.Failed) for event in told):
        world.engine.call(lambda: None).result()
    assert isinstance(told[-1], ggraph.Done)
