"""The stages of gpu_check. Each gives a dictionary: `wrong` lists what failed, `left_out` counts what there was no time for.

In: a clock, a folder for models. Out: findings, printed as they come.
"""
from __future__ import annotations

import itertools
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import synthetic

import ggraph
from ggraph.backends import cuda, ref
from ggraph.backends.cuda import nvrtc, source
from tests import spec
from tests import test_architectures as golden
from tests.backends.cuda.test_goldens import ARCHITECTURES, distance
from tests.backends.cuda.test_nvrtc import variants
from tests.backends.optable import CASES, check, sizes_of

T = TypeVar("T")
MODELS = (("llama-8b", "Q4_K"), ("qwen35-0.8b", "Q4_K"), ("llama-1b", "Q4_0"), ("llama-1b", "Q8_0"))
TINY = (("llama-tiny", "Q4_K"), ("qwen35-tiny", "Q8_0"))
BATCHES, PROMPT, DECODED = (1, 8, 32), 2048, 64
Found = dict[str, Any]


class Check:
    def __init__(self, clock: Any, emulator: bool, only: str, folder: Path):
        self.clock, self.emulator, self.only, self.folder = clock, emulator, re.compile(only), folder
        self.device_name, self.bandwidth = "no device", 0.0

    def _within(self, items: Iterable[T]) -> Iterator[T]:
        """Those whose name is wanted, while there is time; `self.left_out` counts the rest."""
        wanted = [i for i in items if self.only.search(str(i))]
        self.left_out = 0
        for n, item in enumerate(wanted):
            if self.clock.up():
                self.left_out = len(wanted) - n
                print(f"  no time for {self.left_out} of {len(wanted)}")
                return
            yield item

    def doctor(self) -> Found:
        """What ggraph-doctor says."""
        found = ggraph.diagnose()
        for f in found:
            print(f"  {f.part}: {f.name}: {f.value}{'  -> ' + f.remedy if f.state == 'broken' else ''}")
        broken = [] if self.emulator else [f"{f.name}: {f.value}" for f in found if f.part == "cuda" and f.state == "broken"]
        return {"wrong": broken, "findings": [f._asdict() for f in found]}

    def compile(self) -> Found:
        """Every kernel file in every variant, in as many threads as there are cores."""
        device = cuda.open_device()
        target, wrong, times = getattr(device, "target", "sm_90"), [], {}
        self.device_name = device.name
        device.close()
        names = {f"{file} {' '.join(v for _, v in d)}".strip(): (file, d) for file in source.files() for d in variants(file)}

        def one(name: str) -> None:
            start = time.monotonic()
            try:
                nvrtc.cubin(*names[name], target)
                times[name] = round(time.monotonic() - start, 3)
            except ggraph.Error as e:
                wrong.append(f"{name}: {e}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for group in batched(self._within(names), 4 * (os.cpu_count() or 1)):
                list(pool.map(one, group))
        print(f"  {len(times)} of {len(names)} variants for {target}")
        return {"wrong": wrong, "left_out": self.left_out, "target": target, "seconds_of": times}

    def copy(self) -> Found:
        """What a copy within the device reads and writes in a second: the measure of all that follows."""
        device = cuda.open_device()
        nbytes, n = (1 << 20, 3) if self.emulator else (1 << 30, 20)
        a, b = device.alloc(nbytes), device.alloc(nbytes)
        rates = []
        for _ in range(5):
            device.sync()
            start = time.perf_counter()
            for _ in range(n):
                device.copy(b, a, nbytes)
            device.sync()
            rates.append(2 * n * nbytes / (time.perf_counter() - start))
        device.close()
        self.bandwidth = statistics.median(rates)
        print(f"  {self.bandwidth / 1e9:.0f} GB/s")
        return {"wrong": [], "bytes_per_second": self.bandwidth, "samples": rates}

    def ops(self) -> Found:
        """Every case of the op table on the device, against `ref`."""
        backend, definition, wrong, n = cuda.open(), ref.open(), list[str](), 0
        try:
            for case in self._within(CASES):
                n += 1
                try:
                    check(backend, definition, case, sizes_of(definition, case))
                except Exception as e:
                    wrong.append(f"{case}: {str(e) or type(e).__name__}"[:300])
        finally:
            backend.close()
        print(f"  {n - len(wrong)} of {n} cases are right")
        return {"wrong": wrong, "left_out": self.left_out, "n": n}

    def goldens(self) -> Found:
        """llama.cpp's logits of seven architectures."""
        wrong, errors, path = [], dict[str, float](), self.folder / "golden.gguf"
        cases = [c for c in golden.LOGITS.files if spec.specs()[c.split("/")[0]]["arch"] in ARCHITECTURES]
        for case in self._within(sorted(cases, key=lambda c: not c.endswith(("/single", "/q8_0")))):
            name, scenario = case.split("/")
            n_seq, unified, n_ubatch, qtype, rows = golden.SCENARIOS[scenario]
            spec.write(spec.specs()[name], path, qtype)
            got = golden.logits(path, n_seq=n_seq, unified=unified, n_ubatch=n_ubatch, n_decode=8 // n_seq, n_gpu_layers="all")
            errors[case] = distance(case, got[rows], path, "all")
            if errors[case] > golden.TOLERANCE[qtype]:
                wrong.append(f"{case}: NMSE {errors[case]:.1e}")
        print(f"  {len(errors) - len(wrong)} of {len(errors)} are within their bounds")
        return {"wrong": wrong, "left_out": self.left_out, "nmse": errors}

    def speed(self) -> Found:
        """Decode and prefill of whole models: tokens and bytes per second, and the share of the copy's."""
        results = []
        for shape, name in self._within(TINY if self.emulator else MODELS):
            path = self.folder / f"{shape}-{name}.gguf"
            if not path.exists():
                synthetic.write(shape, name, path)
            with ggraph.Model(path, n_gpu_layers="all") as model:
                for n_seq in BATCHES[:2] if self.emulator else BATCHES:
                    results.append(self._decode(model, f"{shape} {name}", n_seq))
                results.append(self._prefill(model, f"{shape} {name}"))
        return {"wrong": [], "left_out": self.left_out, "results": results, "bytes_per_second_of_copy": self.bandwidth}

    def _decode(self, model: ggraph.Model, name: str, n_seq: int) -> Found:
        """Steps of one token for each of `n_seq` sequences, drawn on the device; a lone one does not wait for it."""
        n = 3 if self.emulator else DECODED
        with ggraph.Context(model, n_ctx=256 * n_seq, n_batch=64, n_ubatch=64, n_seq_max=n_seq) as ctx:
            device: Any = ctx.backends[0]
            drawing = ctx.drawing()
            assert drawing is not None
            drawing.take([()] * n_seq)
            drawing.draw([0.0] * n_seq)
            issue = []
            for step in range(-4, n):
                if step == 0:                                       # sizes seen before are replayed by now
                    drawing.pending()()
                    start = time.perf_counter()
                    device.device.counts.clear()
                elif step > 2 and self.clock.up():
                    n = step
                    break
                batch = ggraph.Batch()
                for seq in range(n_seq):
                    batch.add((step * 7 + seq) % model.n_vocab, None, seq, output=True)
                begin = time.perf_counter()
                drawing.chained = n_seq == 1 and step > -4
                ctx.draw(batch, drawing)
                issue.append(time.perf_counter() - begin)
                if n_seq > 1:
                    drawing.pending()()
            drawing.pending()()
            seconds = (time.perf_counter() - start) / n
            counts = {what: count / n for what, count in device.device.counts.items()}
        nbytes = sum(int(t.nbytes) for t in model.weights.leaves.values() if t.name != "token_embd.weight" or tied(model))
        found = {"model": name, "what": "decode", "n_seq": n_seq, "tokens_per_second": n_seq / seconds, "ms": 1e3 * seconds,
                 "issue_ms": 1e3 * statistics.median(issue[4:]), "bytes_per_second": nbytes / seconds, "counts_per_step": counts}
        self._tell(found, f"decode x{n_seq}")
        return found

    def _prefill(self, model: ggraph.Model, name: str) -> Found:
        n = 16 if self.emulator else PROMPT
        with ggraph.Context(model, n_ctx=n + 256, n_batch=n, n_ubatch=n) as ctx:
            seconds = []
            for i in range(2 if self.emulator else 4):
                if i > 1 and self.clock.up():
                    break
                ctx.memory.clear()
                batch = ggraph.Batch()
                for pos in range(n):
                    batch.add(pos % model.n_vocab, pos, 0, output=pos == n - 1)
                start = time.perf_counter()
                ctx.process("decode", batch)
                seconds.append(time.perf_counter() - start)
        best = statistics.median(seconds[1:])
        found = {"model": name, "what": "prefill", "n": n, "tokens_per_second": n / best, "ms": 1e3 * best, "samples": seconds}
        self._tell(found, f"prefill {n}")
        return found

    def _tell(self, found: Found, what: str) -> None:
        line = f"  {found['model']:18} {what:14} {found['tokens_per_second']:10.1f} t/s {found['ms']:9.3f} ms"
        if rate := found.get("bytes_per_second"):
            found["share_of_copy"] = rate / self.bandwidth if self.bandwidth else None
            line += f" {rate / 1e9:8.1f} GB/s" + (f" {100 * rate / self.bandwidth:5.1f}% of the copy" if self.bandwidth else "")
            line += f", issued in {found['issue_ms']:.3f} ms"
        print(line, flush=True)


def tied(model: ggraph.Model) -> bool:
    return "output.weight" not in model.weights.leaves


def batched(items: Iterable[T], n: int) -> Iterator[Sequence[T]]:
    iterator = iter(items)
    while group := list(itertools.islice(iterator, n)):
        yield group
