#!/usr/bin/env python3
"""Load a server with llama-server's API: many clients, streamed completions of random tokens.

    bench/load.py --url http://127.0.0.1:8080 [--peer-url http://127.0.0.1:8081]

Prints for each number of clients: generated tokens per second over all, the median and 95th percentile of the time to the
first token and of the gaps between tokens; with a peer, the same for it in turn, and ratios. Standard library only.
"""
from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Load:
    """What is asked: `n_prompt` random ids below `n_vocab`, `n_predict` tokens, without the cache."""
    n_prompt: int
    n_predict: int
    n_vocab: int
    seed: int


@dataclass
class Figures:
    rate: float = 0.0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def row(self) -> list[float]:
        """tokens/s; ms to the first token: median, p95; ms between tokens: median, p95, largest."""
        return [self.rate, *(1e3 * f(self.first) for f in (statistics.median, p95)),
                *(1e3 * f(self.gaps or [0.0]) for f in (statistics.median, p95, max))]


def p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def one(url: str, load: Load, number: int, out: Figures) -> None:
    """One client's request; its figures are added to `out`."""
    rng = random.Random(f"{load.seed}-{number}")
    body = {"prompt": [rng.randrange(100, load.n_vocab) for _ in range(load.n_prompt)], "n_predict": load.n_predict,
            "cache_prompt": False, "stream": True, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    start, times, n = time.perf_counter(), list[float](), 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if event.get("stop"):
                    n = event["tokens_predicted"]
                else:
                    times.append(time.perf_counter())
    if n != load.n_predict or not times:
        raise SystemExit(f"{url} generated {n} tokens, {load.n_predict} were asked for")
    out.first.append(times[0] - start)
    out.gaps += [b - a for a, b in itertools.pairwise(times)]


def measure(url: str, load: Load, clients: int) -> Figures:
    """All clients at once, one request each."""
    out = Figures()
    threads = [threading.Thread(target=one, args=(url, load, i, out)) for i in range(clients)]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if len(out.first) < clients:
        raise SystemExit(f"{url}: {clients - len(out.first)} of {clients} requests failed")
    out.rate = clients * load.n_predict / (time.perf_counter() - start)
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", required=True)
    p.add_argument("--peer-url")
    p.add_argument("--clients", default="1,4,8,16")
    p.add_argument("--n-prompt", type=int, default=200)
    p.add_argument("--n-predict", type=int, default=64)
    p.add_argument("--n-vocab", type=int, default=40000)
    p.add_argument("--repeat", type=int, default=1, help="best of so many")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    names = ["clients", "server", "tok/s", "first ms", "p95", "gap ms", "p95", "max"]
    print(" ".join(f"{n:>9}" for n in names))
    load = Load(a.n_prompt, a.n_predict, a.n_vocab, a.seed)
    urls = {"ours": a.url} | ({"peer": a.peer_url} if a.peer_url else {})
    for url in urls.values():       # so that nothing is paid for the first time
        measure(url, load, 2)
    for clients in map(int, a.clients.split(",")):
        rows = {}
        for name, url in urls.items():
            rows[name] = max((measure(url, load, clients) for _ in range(a.repeat)), key=lambda f: f.rate).row()
            print(f"{clients:9} {name:>9} " + " ".join(f"{x:9.1f}" for x in rows[name]), flush=True)
        if len(rows) == 2:
            print(f"{'':9} {'ratio':>9} " + " ".join(f"{x / y if y else 0:9.2f}" for x, y in zip(rows["ours"], rows["peer"])))


if __name__ == "__main__":
    main()
