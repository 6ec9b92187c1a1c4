"""What a benchmark drives: ggraph, or an installed llama.cpp through its low-level decode call.

In: a model file and sizes. Out: a runner that evaluates random tokens and forgets them; no tokenizing, no sampling.
"""
from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import ggraph


@dataclass(frozen=True)
class Params:
    """One setting of everything that can be swept; names and meaning are llama-bench's."""
    model: str
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    flash_attn: bool
    n_gpu_layers: int
    no_kv_offload: bool = False


class Runner(Protocol):
    name: str

    def evaluate(self, n_tokens: int, n_seqs: int = 1) -> None:
        """The next `n_tokens` of each of `n_seqs` sequences in batches of n_batch; the last token's logits are computed."""

    def clear(self) -> None: ...
    def close(self) -> None: ...


class Ours:
    name = "ggraph"

    def __init__(self, p: Params, n_ctx: int, n_seqs: int = 1):
        self.p, self.random = p, random.Random(1)
        self.model = ggraph.Model(p.model, n_gpu_layers=p.n_gpu_layers)
        self.ctx = ggraph.Context(self.model, n_ctx=n_ctx, n_batch=p.n_batch, n_ubatch=p.n_ubatch, n_seq_max=n_seqs,
                                  n_threads=p.n_threads, type_k=p.type_k, type_v=p.type_v, offload_kqv=not p.no_kv_offload,
                                  flash_attn="on" if p.flash_attn else "off")

    def evaluate(self, n_tokens: int, n_seqs: int = 1) -> None:
        while n_tokens > 0:
            n = min(n_tokens, self.p.n_batch // n_seqs)
            n_tokens -= n
            batch = ggraph.Batch()
            for i, token in enumerate(self.random.choices(range(self.model.n_vocab), k=n * n_seqs)):
                batch.add(token, None, i % n_seqs, output=i >= (n - 1) * n_seqs)
            self.ctx.process("decode", batch)

    def clear(self) -> None:
        self.ctx.memory.clear()

    def close(self) -> None:
        self.ctx.close()
        self.model.close()


class Peer:
    """llama.cpp through the package llama-cpp-python (extra `peer`), which pip builds natively for the machine."""
    name = "llama.cpp"

    def __init__(self, p: Params, n_ctx: int, n_seqs: int = 1):
        try:
            import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        except ImportError as e:
            raise ggraph.Error("--peer needs llama-cpp-python; install it with: pip install 'ggraph-runtime[peer]'") from e
        self.lib: Any = llama_cpp
        self.p, self.random, self.pos = p, random.Random(1), 0
        lib = self.lib
        self._log = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._log, None)
        mp = lib.llama_model_default_params()
        mp.n_gpu_layers = p.n_gpu_layers
        self.model = lib.llama_model_load_from_file(p.model.encode(), mp)
        if not self.model:
            raise ggraph.Error(f"llama.cpp cannot load {p.model}")
        cp = lib.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = n_ctx, p.n_batch, p.n_ubatch, n_seqs
        cp.n_threads = cp.n_threads_batch = p.n_threads
        cp.type_k, cp.type_v = (getattr(lib, "GGML_TYPE_" + t.upper()) for t in (p.type_k, p.type_v))
        cp.flash_attn_type = int(p.flash_attn)
        cp.kv_unified, cp.offload_kqv = True, not p.no_kv_offload
        self.ctx = lib.llama_init_from_model(self.model, cp)
        if not self.ctx:
            raise ggraph.Error("llama.cpp cannot open a context with these sizes")
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(p.n_batch, 0, 1)

    def evaluate(self, n_tokens: int, n_seqs: int = 1) -> None:
        while n_tokens > 0:
            n = min(n_tokens, self.p.n_batch // n_seqs)
            n_tokens -= n
            self._fill(n, n_seqs)
            if code := self.lib.llama_decode(self.ctx, self.batch):
                raise ggraph.Error(f"llama_decode returned {code}")
            self.lib.llama_synchronize(self.ctx)

    def _fill(self, n: int, n_seqs: int) -> None:
        b, row = self.batch, 0
        for i in range(n):
            for seq in range(n_seqs):
                b.token[row], b.pos[row], b.n_seq_id[row] = self.random.randrange(self.n_vocab), self.pos + i, 1
                b.seq_id[row][0], b.logits[row] = seq, i == n - 1
                row += 1
        b.n_tokens = row
        self.pos += n

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
        self.pos = 0

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.ctx)
        self.lib.llama_model_free(self.model)


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform
        return platform.processor() or platform.machine()
