"""A trace as one HTML page. In: a `Trace`. Out: the page; steps are shown by a script that stands in it, graphs are SVG."""
from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ._drawing import drawing, kind, sections
from ._record import Node, StepTrace
from ._report import data, render
from ._tables import ranges

if TYPE_CHECKING:
    from .tracing import Run, Trace

WEIGHT = ("product", "attention", "recurrent", "rope", "memory", "norm", "element")     # what a fused step is named after


def page(found: Trace) -> str:
    runs = [{"case": r.case, "kv": r.kv, "about": r.about, "steps": [step(s) for s in r.steps]} for r in found.runs]
    pictures = [[[(name, Markup(drawing(g, part))) for name, part in sections(g)] for g in r.graphs] for r in found.runs]
    layers = {name: ranges(found.model[name]) for name in ("kv_layers", "state_layers")}
    both = comparisons(found)
    return render("trace", model=found.model, pictures=pictures, comparisons=both, data=data({"runs": runs}), **layers)


def step(s: StepTrace) -> dict[str, Any]:
    """What the script reads; nodes as short rows, since there are many."""
    values = {k: v for k, v in asdict(s).items() if k != "nodes"}
    for v in values["variables"]:
        v["layers"] = ranges(v["layers"])
    return {**values, "nodes": [node(n) for n in s.nodes]}


def node(n: Node) -> list[Any]:
    """[names, ops, kind, weights, shape, layer, split, us, bytes]"""
    names, ops = (list(dict.fromkeys(x for x in xs if x)) for xs in (n.names, n.ops))
    main = min((kind(op) for op in ops), key=WEIGHT.index)
    return [" + ".join(names), " + ".join(ops), main, n.type, "×".join(map(str, n.ne)), n.layer, n.split, round(n.us, 2), n.nbytes]


def comparisons(found: Trace) -> list[tuple[str, list[tuple[str, list[dict[str, Any]]]]]]:
    """(case, [(batch, [what each kind of KV makes of it])]) for cases that ran with both."""
    out = []
    for case in dict.fromkeys(r.case for r in found.runs):
        both = [r for r in found.runs if r.case == case]
        if len(both) > 1:
            labels = dict.fromkeys((s.batch, s.label) for r in both for s in r.steps)
            out.append((case, [(label, [side(r, batch) for r in both]) for batch, label in labels]))
    return out


def side(run: Run, batch: int) -> dict[str, Any]:
    steps = [s for s in run.steps if s.batch == batch]
    masks = [v for s in steps for v in s.variables if v.name.startswith("kq_mask")]
    return {"kv": run.kv, "ubatches": [len(s.tokens) for s in steps],
            "masks": list(dict.fromkeys("×".join(map(str, v.ne)) for v in masks)),
            "cells": max((sum(p.used for p in s.pools) for s in steps), default=0),
            "bytes": max((sum(p.bytes_used for p in s.pools) for s in steps), default=0),
            "how": [s.how for s in steps], "ms": sum(s.ms for s in steps)}
