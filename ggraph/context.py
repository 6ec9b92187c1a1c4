"""The loop: a batch goes in, logits come out. `Context.process` is the token's life on one screen.

In: a Model and a Batch. Out: rows of logits or embeddings. A Context holds the memory of up to `n_seq_max` sequences and the
plans of its graphs. It knows no architecture and no backend by name.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any

import numpy as np

from . import debug, env
from .adapters import Adapter, Mix
from .backend import Backend, NodeTime, OutOfMemory, Progress
from .batch import Batch, Ubatch, validate
from .build import Builder, Dims
from .drawing import Drawing
from .errors import Aborted, BatchError, ContextFull, Error, Single, expect, file_path, flags, function, functions, named
from .fit import check_context, need, resolve
from .graph import Graph
from .hook import STOP, Hook
from .inputs import graph_key, sizes
from .memory import Step
from .memory.cache import KVCache
from .memory.layers import LayerMemory
from .model import Model, sensible
from .observe import Observed
from .ops import MROPE
from .perf import Perf
from .schedule.alloc import Arena
from .schedule.plan import Plan, PlanCache
from .shift import settle, shift_graph
from .state import collect, load, put, save
from .tensor import Tensor
from .turn import Turn

Follower = Callable[[Ubatch, np.ndarray], None]


class Context(Single):
    """The state of up to `n_seq_max` sequences over one model. Not for two threads at once: that raises.

    Sizes: `n_ctx` cells (0: the model's own context, lowered to what free memory holds), `n_batch` rows a call,
    `n_ubatch` rows a graph run. `kv_unified`: one pool of cells for all sequences, else n_ctx / n_seq_max for each.
    `type_k`, `type_v`: cache types. `flash_attn`: "auto", "on" or "off". `embeddings` with `pooling` (none, mean, cls,
    last, rank: a reranker's scores): hidden states instead of logits. `rope`: overrides as `cparams.resolve_rope` takes them.
    `on_node`: a `Hook`. `on_step`: called with an `Observed` after every graph run, before memory is committed; what it raises
    takes the step back. It may be set and unset at any time, and makes every step timed.
    `n_rollback`: how many tokens `memory.seq_rm` can take from the end of a sequence where layers are recurrent; each costs
    the memory of a state. `adapters`: as `set_adapters` takes them. `mtp`: run the model's block for next-token prediction in
    place of its layers: every token comes with the hidden state before it (`Batch.add`'s `embd`). `encoder`: run the encoder of a
    model that has one beside its decoder.
    Errors: `PlacementError` if it does not fit, `Error` for values that make no sense.
    """

    instead = "open another Context over the same Model; state_get and state_set carry its memory over"

    def __init__(self, model: Model, *, n_ctx: int = 0, n_batch: int = 2048, n_ubatch: int = 512, n_seq_max: int = 1,
                 kv_unified: bool = True, type_k: str = "f16", type_v: str = "f16", flash_attn: str | bool = "auto",
                 n_threads: int | None = None, n_threads_batch: int | None = None, embeddings: bool = False,
                 pooling: str | None = None, rope: Mapping[str, Any] | None = None, swa_full: bool = False,
                 offload_kqv: bool = True, graph_reuse: bool = True, n_rollback: int = 0, mtp: bool = False, encoder: bool = False,
                 adapters: Sequence[tuple[Adapter, float]] = (), on_node: Hook | None = None,
                 on_step: Callable[[Observed], object] | None = None, progress: Progress | None = None):
        start = time.perf_counter()
        expect("model", model, Model, "a Model; open a file with Model(path)")
        expect("on_node", on_node, (Hook, NoneType), "a Hook")
        flags(offload_kqv=offload_kqv, graph_reuse=graph_reuse)
        functions(on_step=on_step, progress=progress)
        self._debug = env.debug()
        if on_node is None and self._debug >= debug.VALUES:
            on_node = Hook(lambda node: True, debug.seen)
        self.model, self.hook, self.graph_reuse = model, on_node, graph_reuse
        self.cparams = resolve(model, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max, kv_unified=kv_unified,
                               type_k=type_k, type_v=type_v, flash_attn=flash_attn, n_threads=n_threads,
                               n_threads_batch=n_threads_batch, embeddings=embeddings, pooling=pooling, rope=rope,
                               swa_full=swa_full, n_rollback=n_rollback, mtp=mtp, encoder=encoder)
        self.hparams = model.nextn() if mtp else model.encoder() if encoder else model.hparams
        self.mix = Mix(Mix.checked(adapters, model.weights))
        self.placement = model.place(progress, lambda p: need(model, self.hparams, self.cparams, self.mix, offload_kqv, p))
        self.backends: list[Backend] = self.placement.backends
        self.offload_kqv = offload_kqv
        check_context(self.hparams, self.cparams, [il for il in self.hparams.layers if self._home(il).host])
        self.memory = LayerMemory(self.hparams, self.cparams)
        self.arenas: dict[Backend, Arena] = {}
        self.plans = PlanCache()
        self.perf = Perf()
        self._alone = Turn()
        self._aborted = False
        self._running: Plan | None = None           # or ran last
        self.on_step = on_step
        self._rows: np.ndarray | None = None
        self._rows_kind = ""
        self._hidden: np.ndarray | None = None
        self._followers: list[Follower] = []
        self._drawing: Drawing | None = None
        self._encoder: Context | None = None
        with self._alone.lock:                  # a close of the Model waits
            model.enter(self)
            try:
                self._take_adapters(adapters, progress)
                while full := self._open():
                    model.retreat(full, progress)
            except BaseException:
                model.leave(self)
                self._release()
                raise
        self.perf.load_ms = 1e3 * (time.perf_counter() - start)
        debug.opened([b.name for b in self.backends], self.bytes)

    def _open(self) -> str:
        """Allocate cache and arena, and build the plan of a plain decode, so that what does not fit shows at once: then nothing
        stays allocated, and the result says what is full."""
        self.backends = self.placement.backends
        self.arenas = {b: Arena(b) for b in self.backends}
        try:
            self.memory.alloc(self._home)
            self._build(("decode", *self._static_key(), None, "token"))
            return ""
        except OutOfMemory as e:
            if self.placement.device is None:
                raise
            self._release()
            return str(e)

    def _release(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
        self._running = None
        self.plans.clear()
        for arena in self.arenas.values():
            arena.free()
        if self._drawing is not None:
            self._drawing.free()
        self._drawing = None
        self.memory.free()

    def _home(self, il: int) -> Backend:
        """Where the cache of a layer lives."""
        return self.placement.layer(il) if self.offload_kqv else self.placement.host

    # --- sizes

    @property
    def n_ctx(self) -> int:
        return self.cparams.n_ctx

    @property
    def n_seq_max(self) -> int:
        return self.cparams.n_seq_max

    @property
    def bytes(self) -> dict[str, int]:
        """What is allocated: weights (mapped), KV cache, compute arena."""
        return {"weights": sum(t.nbytes for t in self.model.weights.leaves.values()), "kv": self.memory.nbytes,
                "compute": sum(a.nbytes for a in self.arenas.values())}

    # --- one batch

    def process(self, kind: str, batch: Batch) -> None:
        """Run a batch: "decode" (with memory) or "encode". Afterwards `logits` or `embeddings` hold its output rows.

        Ubatch by ubatch; one that fails is rolled back, those before it stay, and the exception's `n_done` says how many
        tokens those are. Errors: `BatchError` (nothing was changed), `ContextFull` (nothing was changed), `Aborted`.
        In a model with an encoder beside its decoder "encode" takes whole texts, which what is decoded afterwards answers.
        """
        if kind == "encode" and self.hparams.encoder is not None:
            self._encode(batch)
        else:
            self._process(kind, batch)

    def _encode(self, batch: Batch) -> None:
        """A Context of the encoder's own makes hidden states of the texts; the memory keeps them for the decoder."""
        with self._alone:
            expect("batch", batch, Batch, "a Batch")
            self._encoder = self._encoder or Context(self.model, encoder=True, **self.cparams.of_encoder())
            self._encoder.process("encode", batch.with_all_outputs())
            rows = self._encoder.embeddings.copy()
            self.memory.encoded(batch.seq_id, rows)
            self._rows, self._rows_kind = rows[batch.output], "embd"

    def draw(self, batch: Batch, drawing: Drawing) -> None:
        """Decode a batch whose output rows stay on the device, where a token of each is drawn. Returns before that is done."""
        drawing.begin()
        self._process("decode", batch, drawing)

    def _process(self, kind: str, batch: Batch, drawing: Drawing | None = None) -> None:
        with self._alone:
            start, n_done, self._aborted = time.perf_counter(), 0, False
            asked = self._validate(kind, batch)
            self._settle()
            steps = self.memory.prepare(asked)
            self._begin_rows(asked)
            for step in steps:
                try:
                    self.memory.apply(step)
                    plan, key, how = self._plan(kind, step, drawing)
                    if drawing is not None:
                        drawing.rows = self._output_rows(step.ubatch)
                    plan.fill(step)
                    self._running = plan
                    if self._aborted:       # between two ubatches
                        raise Aborted("the run was aborted")
                    self._run(plan, step, kind, key, how)
                    if drawing is None:
                        self._take_rows(plan, step, only=len(steps) == 1)
                    elif step.ubatch.n_outputs:
                        drawing.add(plan.fetch(plan.graph.outputs["drawn"]))
                    self.memory.commit()
                except BaseException as e:
                    self.memory.rollback()
                    if isinstance(e, Aborted | ContextFull):
                        e.n_done = n_done
                    raise
                n_done += step.ubatch.n_tokens
            self.perf.add(asked.n_tokens, 1e3 * (time.perf_counter() - start))
            for follow in self._followers:
                follow(asked, self.hidden)

    def follow(self, follower: Follower) -> None:
        """From the next batch on, tell someone of every batch that was done: `follower(batch, hidden)`, with the hidden state
        float32 [n_tokens, n_embd] of each of its rows."""
        function("follower", follower)
        with self._alone:
            self.cparams = replace(self.cparams, hidden=True)
            self._followers.append(follower)

    def _run(self, plan: Plan, step: Step, kind: str, key: tuple[Hashable, ...], how: str) -> None:
        if self.on_step is None and self._debug < debug.TIMES:
            plan.run(self._threads(step), self._see)
            return
        times: list[NodeTime] = []
        start = time.perf_counter()
        plan.run(self._threads(step), self._see, times)
        seconds = time.perf_counter() - start
        if self._debug >= debug.TIMES:
            debug.timed(times)
        if self.on_step is not None:
            self.on_step(Observed(kind, step, plan, key, how, plan.values or {}, times, seconds))

    def _validate(self, kind: str, batch: Batch) -> Ubatch:
        if kind not in ("decode", "encode"):
            raise BatchError(f"a batch is processed as 'decode' or 'encode', not {kind!r}")
        expect("batch", batch, Batch, "a Batch")
        if len(batch) > self.cparams.n_batch:
            raise BatchError(f"the batch has {len(batch)} tokens, n_batch is {self.cparams.n_batch}; split it or raise n_batch")
        hp = self.hparams
        if self.cparams.mtp != batch.both:
            raise BatchError("a context for next-token prediction, and no other, takes tokens with a hidden state each (embd)")
        n_axes = 4 if hp.rope_mode is not None and hp.rope_mode & MROPE else 1
        if self.memory.cross is not None:
            self.memory.cross.check(batch.seq_id)
        asked = validate(batch, self.model.n_vocab, self.cparams.n_seq_max, self.cparams.n_ctx, self.memory.seq_pos_max,
                         same=self.memory.seq_same, n_embd=hp.n_embd, n_axes=n_axes)
        if hp.n_pos and (last := int(asked.pos.max())) >= hp.n_pos:
            raise BatchError(f"the batch reaches position {last}; this model has learned positions 0 to {hp.n_pos - 1} only")
        return asked

    def _threads(self, step: Step) -> int:
        return self.cparams.n_threads if step.ubatch.n_tokens == 1 else self.cparams.n_threads_batch

    def _settle(self) -> None:
        settle(self.memory, self.hparams, self._shift_plan, self.cparams.n_threads_batch)

    def _shift_plan(self, group: KVCache) -> Plan:
        key = ("shift", group.index)
        return self.plans.get(key) or self.plans.put(key, self.plan(shift_graph(self._builder(), group)))

    # --- plans

    def _static_key(self) -> tuple[Hashable, ...]:
        return (self.cparams, self.hook, self.mix.adapters)

    def _plan(self, kind: str, step: Step, drawing: Drawing | None) -> tuple[Plan, tuple[Hashable, ...], str]:
        """The plan of this step's graph key, at the step's sizes; the key; and whether it was built, resized or reused."""
        key = (kind, *self._static_key(), drawing and drawing.key(), *graph_key(step))
        plan = self.plans.get(key) if self.graph_reuse else None
        how = "reused"
        if plan is None:
            plan, how = self._build(key, step.ubatch.token is None, drawing), "built"
        if plan.resize(sizes(step, self.memory)) and how == "reused":
            how = "resized"
        self.perf.plans[how] += 1
        return plan, key, how

    def _build(self, key: Hashable, embd: bool = False, drawing: Drawing | None = None) -> Plan:
        plan = self.plans.put(key, self.plan(self._graph(embd, drawing)))
        debug.planned(plan)
        return plan

    def graph(self, embd: bool = False) -> Graph:
        """The graph of this Context's model, at its largest sizes; `embd`: for a batch of embeddings."""
        flags(embd=embd)
        return self._graph(embd)

    def _graph(self, embd: bool, drawing: Drawing | None = None) -> Graph:
        b = self._builder(embd, drawing)
        with sensible(self.model.path.name):
            getattr(self.model.arch, self.cparams.graph)(b)
        b.check_adapters()
        return b.g

    def _builder(self, embd: bool = False, drawing: Drawing | None = None) -> Builder:
        cp = self.cparams
        dims = Dims.largest(cp, recurrent=self.memory.rs is not None)
        return Builder(self.hparams, self.model.weights, cp, self.memory, dims, embd, self.mix, drawing)

    def plan(self, graph: Graph) -> Plan:
        expect("graph", graph, Graph, "a graph of this Context")
        watch = self.hook.accepts if self.hook else None
        try:
            return Plan(graph, self.backends, self._leaf_home, self.arenas, watch)
        except BaseException:
            self.plans.clear()            # an arena that could not grow is gone, and one that has grown is elsewhere
            raise

    def _leaf_home(self, leaf: Tensor) -> Backend | None:
        if self._drawing is not None and leaf is self._drawing.token:
            return self._drawing.device
        return self.placement.homes.get(leaf) or self.memory.home(leaf)

    def drawing(self) -> Drawing | None:
        """What draws tokens on the device; None unless all of the model and its cache is there, and nobody looks at logits."""
        cp, device = self.cparams, self.placement.device
        if device is None or self.hook or cp.embeddings or cp.hidden or cp.mtp or self.hparams.ngrams:
            return None
        if not (self.offload_kqv and self.placement.whole(self.hparams.layers)):
            return None
        if self._drawing is None:
            self._drawing = Drawing(device).alloc()
        return self._drawing

    def _see(self, plan: Plan, node: Tensor) -> None:
        assert self.hook is not None
        self._alone.in_hook = True
        try:
            answer = self.hook.fn(node.name, plan.array(node).view(), node)
        finally:
            self._alone.in_hook = False
        if answer is STOP:
            raise Aborted(f"a hook stopped the step at {node.name}")
        if answer is not None:
            plan.write(node, np.asarray(answer, plan.array(node).dtype))

    # --- results

    def _begin_rows(self, asked: Ubatch) -> None:
        self._rows, self._rows_kind, self._hidden = None, "", None
        self._asked = asked

    def _take_rows(self, plan: Plan, step: Step, only: bool) -> None:
        """Copy the step's outputs to their place in batch order; a lone step's stay where they were computed."""
        u = step.ubatch
        if (hidden := plan.graph.outputs.get("hidden")) is not None:
            self._take_hidden(plan.array(hidden).reshape(-1, int(hidden.ne[0])), u)
        kind = "logits" if "logits" in plan.graph.outputs else "embd"
        node = plan.graph.outputs[kind]
        rows = plan.array(node).reshape(-1, int(node.ne[0])) if u.n_outputs or kind == "embd" else None
        self._rows_kind = kind
        if rows is None:
            return
        pooled = kind == "embd" and self.cparams.pooling != "none"
        if only and not pooled and (u is self._asked or (u.rows[1:] > u.rows[:-1]).all()):
            self._rows = rows
            return
        if self._rows is None:
            n = self.n_seq_max if pooled else self._asked.n_outputs
            self._rows = np.zeros((n, rows.shape[1]), np.float32)
        self._rows[np.unique(u.seq) if pooled else self._output_rows(u)] = rows

    def _output_rows(self, u: Ubatch) -> np.ndarray:
        """The rows of the result that the outputs of an ubatch go to."""
        row_of: np.ndarray = np.cumsum(self._asked.output) - 1
        return row_of[u.rows[u.output]]

    def _take_hidden(self, rows: np.ndarray, u: Ubatch) -> None:
        """As many rows as the graph has: one per token, or of a block for next-token prediction one per output."""
        outputs = self.cparams.mtp
        if self._hidden is None:
            n = self._asked.n_outputs if outputs else self._asked.n_tokens
            self._hidden = np.zeros((n, rows.shape[1]), np.float32)
        if outputs and u.n_outputs:
            self._hidden[self._output_rows(u)] = rows
        elif not outputs:
            self._hidden[u.rows] = rows

    @property
    def hidden(self) -> np.ndarray:
        """float32 [n_tokens, n_embd], or of a context for next-token prediction [n_outputs, n_embd]: what the output head sees of
        each, in batch order. Of a Context that someone follows."""
        return np.zeros((0, self.hparams.n_embd), np.float32) if self._hidden is None else self._hidden

    @property
    def logits(self) -> np.ndarray:
        """float32 [n_outputs, n_vocab], rows in batch order; read-only, valid until the next `process`."""
        return self._result("logits", self.model.n_vocab)

    @property
    def embeddings(self) -> np.ndarray:
        """float32 [n_outputs, n_embd], or [n_seq, n_embd] with pooling ([n_seq, n_cls_out] with "rank"); read-only, valid until
        the next `process`."""
        return self._result("embd", self.model.hparams.n_embd)

    def _result(self, kind: str, width: int) -> np.ndarray:
        if self._rows_kind and self._rows_kind != kind:
            raise Error("this Context gives " + ("embeddings" if kind == "logits" else "logits") + "; see its option `embeddings`")
        rows: np.ndarray = np.zeros((0, width), np.float32) if self._rows is None else self._rows.view()
        rows.flags.writeable = False
        return rows

    # --- control

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """From the next batch on, exactly these adapters are on, each with its scale. What memory holds stays as it is.

        Another scale of the same adapters costs nothing; other adapters need plans of their own. Errors, and nothing changed:
        `ModelError` for an adapter of another model.
        """
        with self._alone:
            before = self.mix.adapters, self.mix.scales
            self._take_adapters(adapters)
            try:
                if self.mix.adapters != before[0]:
                    self.graph()
            except BaseException:
                self.mix.scales = before[1]
                raise

    @property
    def adapters(self) -> list[tuple[Adapter, float]]:
        """Those that are on, each with its scale."""
        return list(self.mix.scales.items())

    def _take_adapters(self, adapters: Sequence[tuple[Adapter, float]], progress: Progress | None = None) -> None:
        scales = Mix.checked(adapters, self.model.weights)
        if leaves := [t for adapter in scales for t in adapter.leaves]:
            for b in self.backends:
                b.pack(leaves, progress)
        self.mix.scales = scales

    def abort(self) -> None:
        """Stop the running `process` soon, from any thread; it raises `Aborted`. Where none runs, nothing happens."""
        self._aborted = True
        if self._encoder is not None:
            self._encoder.abort()
        if self._running is not None:
            self._running.abort()

    def close(self) -> None:
        """Free cache and arena, once another thread's `process` has ended. What comes after is an Error; so is a close
        by the Context's own hook."""
        with self._alone.lock:
            if self._alone.end():
                self._release()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- save and load

    def state_save(self, path: str | Path, seq: int | None = None) -> None:
        """Write the memory of all sequences, or of one, to a file."""
        with self._alone:
            self._settle()
            save(self.memory, file_path("path", path), seq)

    def state_load(self, path: str | Path, seq: int | None = None) -> None:
        """Replace the memory of all sequences, or of one, by a file's. Error, and nothing changed, if it does not fit."""
        with self._alone:
            self._settle()
            load(self.memory, file_path("path", path), seq)

    def state_get(self, seq: int | None = None) -> dict[str, np.ndarray]:
        """What `state_save` writes, as arrays."""
        with self._alone:
            self._settle()
            return collect(self.memory, seq)

    def state_set(self, state: dict[str, np.ndarray], seq: int | None = None) -> None:
        """As `state_load`, from arrays of `state_get`."""
        with self._alone:
            self._settle()
            put(self.memory, named("state", state), seq, "the state")
