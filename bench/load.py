#!/usr/bin/env python3
"""Load a server with llama-server's API: many clients, streamed completions of random tokens.

    bench/load.py --url http://127.0.0.1:8080 [--peer-url http://127.0.0.1:8081] [--out bench/results/FILE.jsonl]

Prints for each number of clients: generated tokens per second over all, the median and 95th percentile of the time to the
first token and of the gaps between tokens; with a peer, the same for it in turn, and ratios. Then, for each server:
whether a request ever waited while a slot was idle, and by how much the gaps of a stream grow while a long prompt joins, beside
the time that one ubatch of it takes. Start servers with -np 16 -c 16384, the peer with --slots. Standard library only.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOOK = 0.1              # seconds between two looks at the slots
LEAST_WAIT = 0.25       # seconds that a request needs to get to a slot, at most, on its way through HTTP and the tokenizer


@dataclass
class Load:
    """What is asked: `n_prompt` random ids below `n_vocab`, `n_predict` tokens, without the cache."""
    n_prompt: int
    n_predict: int
    n_vocab: int
    seed: int


@dataclass
class Answer:
    """When a request was sent, when its tokens came, and the ms at which the server had evaluated a part of its prompt."""
    sent: float
    times: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]


def ask(url: str, load: Load, number: int, answer: Answer) -> None:
    """One client's request, whose tokens can be watched as they come in `answer`."""
    rng = random.Random(f"{load.seed}-{number}")
    body = {"prompt": [rng.randrange(100, load.n_vocab) for _ in range(load.n_prompt)], "n_predict": load.n_predict,
            "cache_prompt": False, "stream": True, "ignore_eos": True, "temperature": 0, "return_progress": True}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    n = 0
    with urllib.request.urlopen(request, timeout=600) as lines:
        for line in lines:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if event.get("stop"):
                    n = event["tokens_predicted"]
                elif "prompt_progress" in event:
                    answer.parts.append(event["prompt_progress"]["time_ms"])
                else:
                    answer.times.append(time.perf_counter())
    if n != load.n_predict or not answer.times:
        raise SystemExit(f"{url} generated {n} tokens, {load.n_predict} were asked for")


# --- many clients


class Watch(threading.Thread):
    """Looks at the slots while requests run: `waited` is the longest time that more were under way than slots were busy, while
    one was idle."""

    def __init__(self, url: str, running: Sequence[Answer], done: set[int]):
        super().__init__(daemon=True)
        self.url, self.running, self.done = url, running, done
        self.waited, self.looks, self.stop = 0.0, 0, threading.Event()

    def run(self) -> None:
        since: float | None = None
        while not self.stop.wait(LOOK):
            under_way = [a for i, a in enumerate(self.running) if i not in self.done]
            with urllib.request.urlopen(f"{self.url}/slots", timeout=60) as r:
                slots = json.load(r)
            now, busy = time.perf_counter(), sum(bool(s["is_processing"]) for s in slots)
            self.looks += 1
            late = [a for i, a in enumerate(self.running) if i not in self.done and a in under_way and now - a.sent > LEAST_WAIT]
            since = (since or now) if busy < min(len(late), len(slots)) else None
            self.waited = max(self.waited, now - since if since else 0.0)


@dataclass
class Figures:
    rate: float
    first: list[float]
    gaps: list[float]
    waited: float
    looks: int

    def row(self) -> list[float]:
        """tokens/s; ms to the first token: median, p95; ms between tokens: median, p95, largest."""
        return [self.rate, *(1e3 * f(self.first) for f in (statistics.median, p95)),
                *(1e3 * f(self.gaps or [0.0]) for f in (statistics.median, p95, max))]


def p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def measure(url: str, load: Load, clients: int) -> Figures:
    """All clients at once, one request each."""
    start, done = time.perf_counter(), set[int]()
    answers = [Answer(start) for _ in range(clients)]

    def client(i: int) -> None:
        ask(url, load, i, answers[i])
        done.add(i)
    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    watch = Watch(url, answers, done)
    for t in (*threads, watch):
        t.start()
    for t in threads:
        t.join()
    rate = clients * load.n_predict / (time.perf_counter() - start)
    watch.stop.set()
    watch.join()
    if len(done) < clients:
        raise SystemExit(f"{url}: {clients - len(done)} of {clients} requests failed")
    return Figures(rate, [a.times[0] - a.sent for a in answers], [g for a in answers for g in a.gaps], watch.waited, watch.looks)


# --- a long prompt joins


@dataclass
class Joined:
    """Milliseconds: gaps of a stream alone and while another prompt of `n_prompt` tokens is evaluated, and the time of the slowest
    ubatch of that, without a stream beside it."""
    n_prompt: int
    alone: float
    median: float
    largest: float
    ubatch: float

    @property
    def growth(self) -> float:
        return self.largest - self.alone


def join(url: str, load: Load, n_long: int) -> Joined:
    quiet, stream, long = Answer(0.0), Answer(time.perf_counter()), Answer(0.0)
    ask(url, Load(n_long, 1, load.n_vocab, load.seed), -3, quiet)
    first = threading.Thread(target=ask, args=(url, Load(32, 256, load.n_vocab, load.seed), -1, stream))
    first.start()
    while len(stream.times) < 48 and first.is_alive():
        time.sleep(0.005)
    long.sent = time.perf_counter()
    ask(url, Load(n_long, 1, load.n_vocab, load.seed), -2, long)
    first.join()
    if not long.times:
        raise SystemExit(f"{url}: the stream failed")
    pairs = list(itertools.pairwise(stream.times))
    before = [b - a for a, b in pairs[8:] if b <= long.sent]
    beside = [b - a for a, b in pairs if b > long.sent and a < long.times[0]]
    ubatch = max(b - a for a, b in itertools.pairwise(quiet.parts))
    return Joined(n_long, 1e3 * statistics.median(before), 1e3 * statistics.median(beside), 1e3 * max(beside), ubatch)


def report(name: str, waited: float, looks: int, joined: Joined) -> None:
    held = "holds" if waited == 0 else f"is broken: for {1e3 * waited:.0f} ms"
    print(f"{name}: no request waits while a slot is idle: {held} ({looks} looks)")
    j = joined
    held = "holds" if j.growth <= 1.25 * j.ubatch else "is broken"
    print(f"{name}: a prompt of {j.n_prompt} tokens joins a stream, whose gaps are {j.alone:.0f} ms alone, {j.median:.0f} ms then, "
          f"{j.largest:.0f} ms at most")
    print(f"{name}: they grow by at most one ubatch: {held} (by {j.growth:.0f} ms; the slowest ubatch takes {j.ubatch:.0f} ms)")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", required=True)
    p.add_argument("--peer-url")
    p.add_argument("--clients", default="1,4,8,16")
    p.add_argument("--n-prompt", type=int, default=200)
    p.add_argument("--n-predict", type=int, default=64)
    p.add_argument("--n-vocab", type=int, default=40000)
    p.add_argument("--n-long", type=int, default=4096, help="tokens of the prompt that joins a stream")
    p.add_argument("--repeat", type=int, default=1, help="best of so many")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, help="append the figures to this file, as lines of JSON")
    p.add_argument("--machine", default="", help="what the file says of the machine")
    return p.parse_args()


def main() -> None:
    a = arguments()
    names = ["clients", "server", "tok/s", "first ms", "p95", "gap ms", "p95", "max"]
    print(" ".join(f"{n:>9}" for n in names))
    load = Load(a.n_prompt, a.n_predict, a.n_vocab, a.seed)
    urls = {"ours": a.url} | ({"peer": a.peer_url} if a.peer_url else {})
    waited, looks, kept = dict.fromkeys(urls, 0.0), dict.fromkeys(urls, 0), list[dict[str, Any]]()
    for url in urls.values():       # so that nothing is paid for the first time
        measure(url, load, 2)
    for clients in map(int, a.clients.split(",")):
        rows = {}
        for name, url in urls.items():
            runs = [measure(url, load, clients) for _ in range(a.repeat)]
            waited[name], looks[name] = max(waited[name], *(f.waited for f in runs)), looks[name] + sum(f.looks for f in runs)
            rows[name] = max(runs, key=lambda f: f.rate).row()
            kept.append({"server": name, "clients": clients, **dict(zip(("tokens_per_second", "first_ms", "first_p95_ms", "gap_ms",
                         "gap_p95_ms", "gap_max_ms"), rows[name]))})
            print(f"{clients:9} {name:>9} " + " ".join(f"{x:9.1f}" for x in rows[name]), flush=True)
        if len(rows) == 2:
            print(f"{'':9} {'ratio':>9} " + " ".join(f"{x / y if y else 0:9.2f}" for x, y in zip(rows["ours"], rows["peer"])))
    for name, url in urls.items():
        joined = join(url, load, a.n_long)
        report(name, waited[name], looks[name], joined)
        kept.append({"server": name, "waited_ms": 1e3 * waited[name], "joined": asdict(joined)})
    if a.out:
        head = {"date": time.strftime("%Y-%m-%d"), "machine": a.machine, **asdict(load)}
        with a.out.open("a") as f:
            f.writelines(json.dumps({**head, **row}) + "\n" for row in kept)


if __name__ == "__main__":
    main()
