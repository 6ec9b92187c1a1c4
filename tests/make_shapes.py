"""Golden logits of the models of other shapes, as llama.cpp computes them: `python -m tests.make_shapes`.

In: the specs in tests/golden/models/shapes.json.xz. Out: shapes.npz beside it, to which it adds those that are not there yet;
`bench/shapes.py --keep` adds specs. Needs the package llama-cpp-python (0.3.36 made the present file), which no test needs.
"""
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests import spec

N_PREFILL, N_DECODE, N_CTX, N_UBATCH = 30, 2, 256, 16


def logits(path: Path, encode: bool) -> np.ndarray:
    """float32 [N_PREFILL + N_DECODE, n_vocab]: one batch, then single tokens. Encoders see the first batch twice."""
    import llama_cpp.llama_cpp as lib  # type: ignore[import-not-found]

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model, f"llama.cpp refuses {path}"
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = N_CTX
    params.n_ubatch = N_CTX if encode else N_UBATCH
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(model, params)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows, start = [], 0
    for n in [N_PREFILL] + [1] * N_DECODE:
        batch = fill(lib.llama_batch_init(n, 0, 1), start, n)
        if encode and start == 0:
            assert lib.llama_encode(context, batch) == 0
        assert lib.llama_decode(context, batch) == 0
        rows += [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (n_vocab,)).copy() for i in range(n)]
        lib.llama_batch_free(batch)
        start += n
    lib.llama_free(context)
    lib.llama_model_free(model)
    return np.stack(rows)


def fill(batch: Any, start: int, n: int) -> Any:
    """Tokens start to start + n of the one text that all goldens use."""
    text = spec.tokens()
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = text[(start + i) % len(text)], start + i, 1, 1
        batch.seq_id[i][0] = 0
    return batch


def main() -> None:
    path = spec.FOLDER / "shapes.npz"
    found = dict(np.load(path)) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for case in (c for c in spec.shapes() if c["name"] not in found):
            rows = logits(spec.write(case["spec"], Path(folder) / "m.gguf"), case["spec"].get("encode", False))[case["rows"]]
            found[case["name"]] = np.where(rows < -1e38, -np.inf, rows)                 # of tokens that are never meant
            print(case["name"])
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main()
