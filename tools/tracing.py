"""ggraph-trace: what happens inside, step by step: the five variables, cells, graph, plan, and the time of every node.

In: a model, prompts, which cases to show. Out: a table, JSON, Graphviz dot, or one HTML page that needs nothing else.
"""
from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import ggraph
from ggraph import env, hub

from ._console import Bars
from ._options import CONTEXT, MODEL, ROPE, Command, IntRange, Params, context_arguments, group, model_arguments, options
from ._output import check_target, write_text
from ._record import GraphTrace, Recorder, StepTrace
from ._scenes import N_SEQ, SCENES, rows

PROMPT = "The sky is blue because of"
KV = {True: "unified", False: "per sequence"}


@dataclass(frozen=True)
class Run:
    """One case in one context. `about` says what it shows."""
    case: str
    kv: str
    about: str
    sizes: dict[str, int]
    steps: list[StepTrace]
    graphs: list[GraphTrace]


@dataclass(frozen=True)
class Trace:
    """All runs over one model. `model`: name, architecture, sizes. `context`: what the contexts were opened with."""
    model: dict[str, Any]
    context: dict[str, Any]
    runs: list[Run]

    def json(self) -> dict[str, Any]:
        return asdict(self)


def trace(model: ggraph.Model, prompts: Sequence[str | Sequence[int]], *, cases: Sequence[str] = ("plain",),
          kv_unified: Sequence[bool] = (True,), n_predict: int = 2, n_draft: int = 4, n_ctx: int = 0,
          progress: Callable[[str, int, int], None] | None = None, **context: Any) -> Trace:
    """Run the cases ("plain", "mixed", "verify") and record every step. A prompt is text or token ids.

    The second prompt, for "mixed", is the second half of the first if there is none. `kv_unified`: with one pool of cells, with
    a stream for each sequence, or both. `n_ctx` 0: what the cases need. Errors: `Error` for a prompt that is too short.
    """
    if not model.hparams.head or not model.hparams.causal:
        raise ggraph.Error(f"{model.path.name} writes no text: it gives embeddings, and ggraph-trace shows how text is written")
    tokens = [model.vocab.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    tokens += [tokens[0][len(tokens[0]) // 2:]] * (len(tokens) < 2)
    if not all(tokens):
        raise ggraph.Error("a prompt without tokens shows nothing; give a longer one")
    todo = [(case, unified) for case in cases for unified in kv_unified]
    runs = []
    for i, (case, unified) in enumerate(todo):
        if progress:
            progress("trace", i, len(todo))
        needed = sum(map(len, tokens)) + (n_predict + 1) * (n_draft + 1) + 8
        sizes = {"n_ctx": n_ctx or needed * N_SEQ[case], "kv_unified": unified}
        runs.append(record(model, case, tokens, n_predict, n_draft, **sizes, **context))
    if progress:
        progress("trace", len(todo), len(todo))
    return Trace(describe(model), {k: v for k, v in context.items() if isinstance(v, str | int) and v}, runs)


def record(model: ggraph.Model, case: str, tokens: Sequence[Sequence[int]], n_predict: int, n_draft: int, **context: Any) -> Run:
    """One case, in a context of its own."""
    rollback = n_draft if case == "verify" and any(map(model.hparams.is_recurrent, range(model.hparams.n_layer))) else 0
    with ggraph.Context(model, n_seq_max=N_SEQ[case], n_rollback=rollback, **context) as ctx:
        ctx.process("decode", rows((0, tokens[0][:1])))          # what runs for the first time takes longer
        ctx.memory.clear()
        recorder = Recorder(ctx)
        SCENES[case](recorder, tokens, n_predict, n_draft)
        about = " ".join((SCENES[case].__doc__ or "").split())
        return Run(case, KV[ctx.cparams.kv_unified], about, ctx.bytes, recorder.steps, recorder.graphs)


def describe(model: ggraph.Model) -> dict[str, Any]:
    hp, types = model.hparams, Counter[str]()
    for t in model.file.tensors.values():
        types[t.type.name] += t.nbytes
    return {"name": model.path.name, "arch": hp.arch, "n_params": model.n_params, "n_layer": hp.n_layer, "n_embd": hp.n_embd,
            "n_vocab": hp.n_vocab, "n_ctx_train": hp.n_ctx_train, "n_head": hp.n_head[0], "n_head_kv": hp.n_head_kv[0],
            "type": types.most_common(1)[0][0],
            "kv_layers": [il for il in range(hp.n_layer) if hp.has_kv(il)],
            "state_layers": [il for il in range(hp.n_layer) if hp.is_recurrent(il)]}


# --- as text

def dot(found: Trace) -> str:
    """Every graph as a cluster of Graphviz dot; views are dashed."""
    lines = ["digraph ggraph {", '  rankdir=TB; node [shape=box, fontname="sans-serif", fontsize=10];']
    for i, r in enumerate(found.runs):
        for n, graph in enumerate(r.graphs):
            label = quoted(f"{r.case}, {r.kv} KV, graph {n}: " + ", ".join(graph.key))
            lines.append(f"  subgraph cluster_{i}_{n} {{ label={label};")
            lines += [f"    {line}" for line in dot_nodes(graph, f"g{i}_{n}")] + ["  }"]
    return "\n".join([*lines, "}"]) + "\n"


def dot_nodes(graph: GraphTrace, prefix: str) -> Iterator[str]:
    leaves = dict.fromkeys(s for n in graph.nodes for s in n.src if isinstance(s, str))
    ids = {name: f"{prefix}_leaf{i}" for i, name in enumerate(leaves)}
    for name in leaves:
        yield f"{ids[name]} [label={quoted(name)}, shape=ellipse];"
    for n in graph.nodes:
        label = f"{n.name or n.op}\n{n.op} {n.type}[{', '.join(n.ne)}]"
        yield f"{prefix}_{n.id} [label={quoted(label)}{', style=dashed' if n.view else ''}];"
        for s in n.src:
            yield f"{ids[s] if isinstance(s, str) else f'{prefix}_{s}'} -> {prefix}_{n.id};"


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


# --- the command

def _ids(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[list[int]]:
    """1,2,3 -> [1, 2, 3]"""
    try:
        return [[int(word) for word in value.split(",")] for value in values]
    except ValueError:
        raise click.BadParameter(f"{', '.join(values)!r} are not token ids, as in 1,2,3") from None


_what, _out = group("What to show"), group("Output")
WHAT = (
    _what("-p", "--prompt", multiple=True, metavar="TEXT",
          help=f"The text to continue. A second one joins it in the case `mixed`.  [default: {PROMPT}]"),
    _what("--token-ids", multiple=True, callback=_ids, metavar="ID,ID,..",
          help="The same as ids, for a file without a tokenizer. May be repeated."),
    _what("n_predict", "-n", "--predict", "--n-predict", type=IntRange(min=0), default=2, show_default=True, metavar="N",
          help="Steps after the prompt."),
    _what("cases", "--case", multiple=True, type=click.Choice([*SCENES, "all"]), default=("plain",),
          help="One text; texts that share a batch; guesses that are verified. May be repeated.  [default: plain]"),
    _what("--compare-kv", is_flag=True, help="Each case twice: one pool of KV cells, and a stream for each sequence."),
    _what("n_draft", "--draft", "--draft-max", type=IntRange(min=1), default=4, show_default=True, metavar="N",
          help="Guesses of a verify step."),
)
OUTPUT = (
    _out("--html", type=click.Path(dir_okay=False), metavar="FILE",
         help="Write a page to look at, which needs no network; - is standard output."),
    _out("dot_file", "--dot", type=click.Path(dir_okay=False), metavar="FILE",
         help="Write the graphs for Graphviz; - is standard output."),
    _out("as_json", "--json", is_flag=True, help="Everything as JSON on standard output, in place of the table."),
    _out("n_nodes", "--nodes", type=IntRange(min=0), default=12, show_default=True, metavar="N",
         help="Slowest nodes in the table."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@options(WHAT, MODEL, CONTEXT, ROPE, OUTPUT)
@click.version_option(ggraph.__version__)
def main(**p: Any) -> None:
    """Show what happens inside while a model reads a prompt and writes: hidden states, positions, mask, memory, decoding."""
    env.set_quiet(p["quiet"])
    check_target(p["html"])
    check_target(p["dot_file"])
    found = run(p)
    if p["html"]:
        from ._page import page
        write_text(Path(p["html"]), page(found))
    if p["dot_file"]:
        write_text(Path(p["dot_file"]), dot(found))
    if p["as_json"]:
        click.echo(json.dumps(found.json(), ensure_ascii=False))
    elif not (p["html"] or p["dot_file"]):
        from ._tables import show
        show(found, p["n_nodes"])


def run(p: Params) -> Trace:
    cases = list(SCENES) if "all" in p["cases"] else list(dict.fromkeys(p["cases"]))
    with Bars(p["quiet"]) as bars:
        path = hub.resolve(p["model"], lambda done, total: bars("fetch", done, total))
        with ggraph.Model(path, **model_arguments(p)) as model:
            context = context_arguments(p)
            unified = (True, False) if p["compare_kv"] else (context.pop("kv_unified"),)
            context.pop("kv_unified", None)
            return trace(model, [*p["prompt"], *p["token_ids"]] or [PROMPT], cases=cases, kv_unified=unified,
                         n_predict=p["n_predict"], n_draft=p["n_draft"], progress=bars, **context)


if __name__ == "__main__":
    sys.exit(main())
