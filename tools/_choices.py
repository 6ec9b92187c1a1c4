"""Multiple choice: which of several endings a model finds likeliest. HellaSwag, WinoGrande and questions with answers.

In: a file of tasks, *.json (an array) or *.jsonl (an object a line), else in llama.cpp's own forms. Out: `Choices`. Texts,
scores and the tasks that are drawn when not all are wanted are llama.cpp's.
"""
from __future__ import annotations

import csv
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ggraph

from ._estimate import Estimate
from ._logits import log_sum_exp
from ._windows import rows_at_once

Z95 = 1.95996398454     # of a normal distribution: 95 % are within
TRAILING = 3            # WinoGrande: with more tokens behind the choice, these alone count


@dataclass(frozen=True)
class Task:
    """Whole texts of which one or more are `correct`. `heads`: their starts up to and with the choice (WinoGrande alone)."""
    texts: tuple[str, ...]
    correct: frozenset[int]
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choices:
    """`answers`: the number of the likeliest text of each task. `interval`: 95 % (Wilson). `chance`: of guessing."""
    kind: str
    n_tasks: int
    n_correct: int
    accuracy: Estimate
    interval: tuple[float, float]
    chance: float
    answers: tuple[int, ...]

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy._asdict()}


@dataclass(frozen=True)
class Scores:
    """Of tokens start, start + 1, ... of a sequence: log-probabilities float64 [n], and whether each is the likeliest."""
    log_p: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.bool_]


Report = Callable[[int, int, float], None]      # (tasks done, of, share correct)


def choices(model: ggraph.Model, kind: str, tasks: Sequence[Task], *, n_ctx: int = 512, n_batch: int = 2048,
            progress: Report | None = None, **context: Any) -> Choices:
    """Score the tasks. `kind`: "hellaswag", "winogrande" or "multiple-choice". Error for a task that does not fit `n_ctx`."""
    answers: list[int] = []
    n_correct = 0
    n_seqs = max(len(t.texts) for t in tasks)
    options = {**context, "n_ctx": n_ctx * n_seqs, "n_batch": n_batch, "n_seq_max": n_seqs, "kv_unified": True}
    with ggraph.Context(model, **options) as ctx:
        for i, task in enumerate(tasks):
            answers.append(_answer(ctx, task, n_ctx, i))
            n_correct += answers[-1] in task.correct
            if progress:
                progress(i + 1, len(tasks), n_correct / (i + 1))
    n, p = len(tasks), n_correct / len(tasks)
    error = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan
    chance = sum(len(t.correct) / len(t.texts) for t in tasks) / n
    return Choices(kind, n, n_correct, Estimate(p, error), wilson(p, n), chance, tuple(answers))


def wilson(p: float, n: int) -> tuple[float, float]:
    """95 % interval of a share p of n tasks."""
    z = Z95 * Z95 / n
    half = z * math.sqrt(n * (4 * p * (1 - p) + z)) / (2 * Z95)
    return (p + z / 2 - half) / (1 + z), (p + z / 2 + half) / (1 + z)


def _answer(ctx: ggraph.Context, task: Task, n_ctx: int, number: int) -> int:
    """The text with the highest mean log-probability from where the texts part; of equals the first, in WinoGrande the last."""
    encode = ctx.model.vocab.encode
    sequences = [encode(text, parse_special=False) for text in task.texts]
    if (longest := max(map(len, sequences))) > n_ctx:
        raise ggraph.Error(f"task {number + 1} has {longest} tokens, windows have {n_ctx}; raise -c")
    part = min(common(sequences), *(len(s) - 1 for s in sequences))
    starts, end = [part] * len(sequences), 0
    if task.heads:
        end = 1
        if all(len(s) - part > TRAILING for s in sequences):
            starts = [min(len(encode(head, parse_special=False)), len(s) - 1) for head, s in zip(task.heads, sequences)]
    means = [s.log_p[:max(1, len(s.log_p) - end)].mean() for s in score(ctx, sequences, starts)]
    return max(range(len(means)), key=lambda i: (means[i], i if task.heads else -i))


def common(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens are the same at the start of all."""
    n = min(map(len, sequences))
    return next((i for i in range(n) if any(s[i] != sequences[0][i] for s in sequences)), n)


def score(ctx: ggraph.Context, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Scores]:
    """Log-probabilities of tokens starts[i], starts[i] + 1, ... of sequence i, after those before them (not of token 0).

    What all have in common is evaluated once; logits of about 64 MiB exist at a time. One sequence of the Context for each.
    """
    ctx.memory.clear()
    starts = [max(1, start) for start in starts]
    out = [Scores(np.zeros(len(s) - start), np.zeros(len(s) - start, bool)) for s, start in zip(sequences, starts)]
    for rows in _batches(_rows(sequences, starts), ctx.cparams.n_batch, rows_at_once(ctx)):
        batch = ggraph.Batch()
        for token, pos, seqs, targets in rows:
            batch.add(token, pos, seqs, output=bool(targets))
        ctx.process("decode", batch)
        for logits, (_, pos, _, targets) in zip(ctx.logits, (r for r in rows if r[3])):
            norm, best = log_sum_exp(logits), int(logits.argmax())
            for seq in targets:
                token, at = sequences[seq][pos + 1], pos + 1 - starts[seq]
                out[seq].log_p[at], out[seq].greedy[at] = float(logits[token]) - norm, token == best
    return out


_Row = tuple[int, int, tuple[int, ...], list[int]]      # token, position, its sequences, those whose next token it predicts


def _rows(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[_Row]:
    everyone = tuple(range(len(sequences)))
    shared = min(common(sequences), *(len(s) - 1 for s in sequences)) if len(sequences) > 1 else 0
    for pos in range(shared):
        yield sequences[0][pos], pos, everyone, [s for s in everyone if pos + 1 >= starts[s]]
    for s in everyone:
        for pos in range(shared, len(sequences[s]) - 1):
            yield sequences[s][pos], pos, (s,), [s] if pos + 1 >= starts[s] else []


def _batches(rows: Iterator[_Row], n_batch: int, n_outputs: int) -> Iterator[list[_Row]]:
    now: list[_Row] = []
    for row in rows:
        if len(now) == n_batch or (row[3] and sum(bool(r[3]) for r in now) == n_outputs):
            yield now
            now = []
        now.append(row)
    if now:
        yield now


# --- files


def load(kind: str, path: str | Path, n_tasks: int = 0) -> list[Task]:
    """The tasks of a file, or `n_tasks` of them as llama.cpp draws them. Error that names the task that makes no sense."""
    data, suffix = Path(path).read_bytes(), Path(path).suffix.lower()
    try:
        records = {".json": _array, ".jsonl": _lines}.get(suffix, _LLAMA_CPP[kind])(data)
    except (ValueError, KeyError, IndexError, struct.error) as e:
        raise ggraph.Error(f"{path} has no {kind} tasks: {e!r}; docs/measuring.md shows the forms") from e
    tasks = []
    for i, record in enumerate(records):
        try:
            tasks.append(_TASK[kind](record))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            raise ggraph.Error(f"{path}: task {i + 1} makes no sense: {e!r}; docs/measuring.md shows the forms") from e
    if not tasks:
        raise ggraph.Error(f"{path} has no tasks")
    return draw(kind, tasks, n_tasks)


def _array(data: bytes) -> list[Mapping[str, Any]]:
    return list(json.loads(data))


def _lines(data: bytes) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in data.decode().splitlines() if line.strip()]


def _hellaswag(record: Mapping[str, Any]) -> Task:
    context = record["context"] if "context" in record else f"{record['activity_label']}: {record['ctx']}"
    return _task([f"{context} {ending}" for ending in record["endings"]], [int(record["label"])])


def _winogrande(record: Mapping[str, Any]) -> Task:
    before, after = record["sentence"].split("_", 1)
    heads = [before + record["option1"], before + record["option2"]]
    return _task([head + after for head in heads], [int(record["answer"]) - 1], heads)


def _multiple_choice(record: Mapping[str, Any]) -> Task:
    """Also as TruthfulQA (mc1_targets) and ARC (choices with text and label, answerKey) have it."""
    answers = record.get("mc1_targets", record.get("choices"))
    if isinstance(answers, Mapping) and "labels" in answers:
        texts, correct = answers["choices"], [i for i, label in enumerate(answers["labels"]) if label == 1]
    elif isinstance(answers, Mapping):
        texts, correct = answers["text"], [answers["label"].index(record["answerKey"])]
    else:
        texts, correct = answers, [int(record["answer"])]
    return _task([f"{record['question']} {text}" for text in texts], correct)


def _task(texts: Sequence[str], correct: Sequence[int], heads: Sequence[str] = ()) -> Task:
    if len(texts) < 2 or not correct or not all(0 <= i < len(texts) for i in correct):
        raise ValueError(f"{len(texts)} texts, of which {list(correct)} are correct")
    return Task(tuple(texts), frozenset(correct), tuple(heads))


_TASK = {"hellaswag": _hellaswag, "winogrande": _winogrande, "multiple-choice": _multiple_choice}


def _six_lines(data: bytes) -> list[Mapping[str, Any]]:
    """HellaSwag: context, number of the right ending, four endings."""
    lines = data.decode().removesuffix("\n").split("\n")
    if len(lines) % 6:
        raise ValueError(f"{len(lines)} lines; each task has 6")
    return [{"context": lines[i], "label": lines[i + 1], "endings": lines[i + 2:i + 6]} for i in range(0, len(lines), 6)]


def _csv(data: bytes) -> list[Mapping[str, Any]]:
    """WinoGrande: number, sentence, two choices, answer."""
    rows = csv.reader(io.StringIO(data.decode()))
    return [dict(zip(("sentence", "option1", "option2", "answer"), row[1:5])) for row in rows if row]


def _binary(data: bytes) -> list[Mapping[str, Any]]:
    """uint32 count, offsets; then for each task its question and twice answers with int32 labels, of which the first count."""
    at = 0

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        if at > len(data):
            raise ValueError(f"cut short at byte {len(data)}")
        return data[at - n:at]

    def integer() -> int:
        return int(struct.unpack("<I", take(4))[0])

    def answers() -> dict[str, Any]:
        n = integer()
        return {"choices": [take(integer()).decode() for _ in range(n)], "labels": list(struct.unpack(f"<{n}i", take(4 * n)))}
    n_tasks = integer()
    take(4 * n_tasks)
    found: list[Mapping[str, Any]] = []
    for _ in range(n_tasks):
        found.append({"question": take(integer()).decode(), "mc1_targets": answers()})
        answers()
    return found


_LLAMA_CPP: dict[str, Callable[[bytes], list[Mapping[str, Any]]]] = {
    "hellaswag": _six_lines, "winogrande": _csv, "multiple-choice": _binary}


def draw(kind: str, tasks: Sequence[Task], n_tasks: int) -> list[Task]:
    """`n_tasks` of the tasks, those that llama.cpp draws, in its order; 0, or as many as there are: all.

    HellaSwag is drawn from even when all are wanted, the others then keep their order.
    """
    left, n = list(tasks), min(n_tasks or len(tasks), len(tasks))
    random = np.random.RandomState(1)
    drawn = []
    if n == len(left) and kind != "hellaswag":
        return left
    for _ in range(n):
        if kind == "hellaswag":
            drawn.append(left.pop(_below(random, len(left))))
        else:
            i = int(np.float32(_raw(random)) * np.float32(2.0**-32) * np.float32(len(left)))
            drawn.append(left[min(i, len(left) - 1)])
            left[min(i, len(left) - 1)] = left[-1]
            left.pop()
    return drawn


def _raw(random: np.random.RandomState) -> int:
    """The next 32 bits of MT19937."""
    return int.from_bytes(random.bytes(4), "little")


def _below(random: np.random.RandomState, n: int) -> int:
    """As libstdc++'s uniform_int_distribution over 0 ... n - 1."""
    product = _raw(random) * n
    while product % 2**32 < 2**32 % n:
        product = _raw(random) * n
    return product >> 32
