"""ggraph-perplexity's peak memory at windows of 4096 and a vocabulary of 262,144: the models that it loads and 600 MiB."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from tests import spec, tiny

N_VOCAB = 262144
MARGIN = 600 << 20
CODE = """
import sys
from ggraph.tools.perplexity import main
main(sys.argv[1:], standalone_mode=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def peak(*args: str | Path) -> int:
    """Bytes that were resident at once in a process of its own: its own memory, and mapped pages as long as they stay."""
    done = subprocess.run([sys.executable, "-c", CODE, "-q", "-c", "4096", "--chunks", "1", *map(str, args)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) << 10


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with pieces that no text has, and the rows of both embeddings, to 262,144 tokens."""
    n = N_VOCAB - tiny.N_VOCAB
    kinds = next(value for key, _, value in tiny.tiny()["kv"] if key == "tokenizer.ggml.token_type")
    own = tiny.tiny(
        llama__context_length=8192, tokenizer__ggml__tokens=[*tiny.TOKENS, *(f"<unused{i}>" for i in range(n))],
        tokenizer__ggml__scores=[-float(i) for i in range(N_VOCAB)],
        tokenizer__ggml__token_type=[*kinds, *[int(gguf.TokenType.UNUSED)] * n])
    tensors = [[name, [shape[0], N_VOCAB] if shape[-1] == tiny.N_VOCAB else shape, kind] for name, shape, kind in own["tensors"]]
    return spec.write({**own, "tensors": tensors}, tmp_path_factory.mktemp("wide") / "m.gguf")


def test_side_by_side(wide: Path) -> None:
    assert peak("-m", wide, "--base", wide) < 2 * wide.stat().st_size + MARGIN


def test_with_a_file_of_the_bases_predictions(wide: Path) -> None:
    saved = wide.with_name("base.kld")
    try:
        assert peak("-m", wide, "--save-all-logits", saved) < wide.stat().st_size + MARGIN
        assert saved.stat().st_size > MARGIN, "more than may be held"
        assert peak("-m", wide, "--kl-divergence", "--kl-divergence-base", saved) < wide.stat().st_size + MARGIN
    finally:
        saved.unlink(missing_ok=True)


def test_gemma(gemma3: Path) -> None:
    assert peak("-m", gemma3, "--base", gemma3) < 2 * gemma3.stat().st_size + MARGIN
