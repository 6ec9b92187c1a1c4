"""Routes about text alone: tokenize, detokenize; embeddings, reranking.

In: checked bodies. Out: plain JSON.
"""
from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from .problem import JSON, Problem
from .schema import Detokenize, Embeddings, Rerank, Tokenize
from .service import Service, in_thread
from .stream import while_connected


async def tokenize(service: Service, request: Request, body: Tokenize) -> Response:
    ids = await in_thread(service.encode, body.content, body.add_special, body.parse_special)
    if not body.with_pieces:
        return JSON({"tokens": ids})
    return JSON({"tokens": [{"id": id, "piece": _piece(service.vocab.piece(id))} for id in ids]})


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(service: Service, request: Request, body: Detokenize) -> Response:
    ids = service.encode(list(body.tokens))
    return JSON({"content": await in_thread(service.vocab.decode, ids)})


async def embeddings(service: Service, request: Request, body: Embeddings, openai: bool) -> Response:
    """One vector for each text; without pooling one for each token, which OpenAI's form has no place for."""
    embedder = service.embedder
    pooled = embedder.ctx.cparams.pooling != "none"
    if openai and not pooled:
        raise Problem(400, "Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    if body.encoding_format not in ("float", "base64"):
        raise Problem(400, "The format to return the embeddings in. Can be either float or base64")
    given = body.input if body.input is not None else body.content
    if given is None:
        raise Problem(400, '"input" or "content" must be provided')
    texts = await in_thread(lambda: [service.encode(p) for p in service.prompts(given)[0]])
    for ids in texts:
        if len(ids) > embedder.n_max:
            raise Problem(400, f"input ({len(ids)} tokens) is too large to process. increase the physical batch size (current "
                               f"batch size: {embedder.n_max})")
    futures = [asyncio.wrap_future(embedder.submit(ids)) for ids in texts]
    rows = await while_connected(request, asyncio.gather(*futures))
    norm = service.options.embd_normalize if body.embd_normalize is None else body.embd_normalize
    vectors = [_normalized(_cut(row, body.dimensions), norm if pooled else -1) for row in rows]
    if not openai:
        return JSON([{"index": i, "embedding": np.atleast_2d(v).tolist()} for i, v in enumerate(vectors)])
    n = sum(map(len, texts))
    data = [{"embedding": _encoded(v, body.encoding_format), "index": i, "object": "embedding"} for i, v in enumerate(vectors)]
    return JSON({"model": service.name, "object": "list", "usage": {"prompt_tokens": n, "total_tokens": n}, "data": data})


async def rerank(service: Service, request: Request, body: Rerank) -> Response:
    """How well each document answers the query, best first; in Jina's form, or for `texts` in TEI's."""
    if service.ctx.cparams.pooling != "rank":
        raise Problem(501, "This server does not support reranking. Start it with `--reranking`")
    if body.query is None:
        raise Problem(400, '"query" must be provided')
    texts: list[Any] = [d.get("text") if isinstance(d, dict) else d for d in body.texts or body.documents or []]
    if not texts or not all(isinstance(t, str) for t in texts):
        raise Problem(400, '"documents" must be a non-empty string array')
    pairs = await in_thread(lambda: [_pair(service, body.query or "", t) for t in texts])
    futures = [asyncio.wrap_future(service.embedder.submit(ids)) for ids in pairs]
    rows = await while_connected(request, asyncio.gather(*futures))
    scores = [float(row[0]) for row in rows]
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[:body.top_n]
    if body.texts is not None:
        return JSON([{"index": i, "score": scores[i], **({"text": texts[i]} if body.return_text else {})} for i in order])
    n = sum(map(len, pairs))
    return JSON({"model": service.name, "object": "list", "usage": {"prompt_tokens": n, "total_tokens": n},
                 "results": [{"index": i, "relevance_score": scores[i]} for i in order]})


def _pair(service: Service, query: str, document: str) -> list[int]:
    """Query and document as one text: by the file's own template, else joined by the end and separator tokens."""
    vocab = service.vocab
    template = service.model.kv.get("tokenizer.chat_template.rerank")
    if template:
        return vocab.encode(str(template).replace("{query}", query).replace("{document}", document), add_special=False)
    end = [vocab.sep if vocab.eos is None else vocab.eos] if vocab.add_eos else []
    start, between = [vocab.bos] if vocab.add_bos else [], [vocab.sep] if vocab.add_sep else []
    q, d = (vocab.encode(text, add_special=False, parse_special=False) for text in (query, document))
    return [id for id in [*start, *q, *end, *between, *d, *end] if id is not None]


def _cut(v: npt.NDArray[np.float32], n: int | None) -> npt.NDArray[np.float32]:
    """Its first n numbers, which are an embedding of their own where a model was trained for it."""
    if n is not None and not 1 <= n <= v.shape[-1]:
        raise Problem(400, f"Field 'dimensions': Value must be between 1 <= value <= {v.shape[-1]}, but got {n}")
    return v if n is None else v[..., :n]


def _normalized(v: npt.NDArray[np.float32], p: int) -> npt.NDArray[np.float32]:
    """-1: as it is, 0: the largest is 32760, 2: length 1, else by the p-norm."""
    if p < 0:
        return v
    norm = float(np.abs(v).max()) / 32760 if p == 0 else float((np.abs(v.astype(np.float64)) ** p).sum() ** (1 / p))
    return v / np.float32(norm) if norm > 0 else v


def _encoded(v: npt.NDArray[np.float32], how: str) -> Any:
    return v.tolist() if how == "float" else base64.b64encode(v.astype("<f4").tobytes()).decode()
