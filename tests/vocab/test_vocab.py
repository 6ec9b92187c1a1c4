"""Vocabularies of every kind against llama.cpp's answers, and what a Vocab promises for any text and any file."""
from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggraph
from ggraph import gguf
from ggraph.errors import VocabError
from ggraph.vocab import Vocab, special
from tests.vocab.build import NAMES, golden, load, load_golden, write

KINDS = ["bpe", "bpe-gemma4", "bpe-holes", "rwkv", "spm", "ugm", "wpm"]
any_text = st.text(st.characters() | st.characters(categories=["Cs"]) | st.sampled_from(" \n\t'sS1é́你<>|▁\0"))
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocab]:
    return {name: load_golden(tmp_path_factory.mktemp(name), name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpps_answers(name: str, vocabs: dict[str, Vocab]) -> None:
    vocab, data = vocabs[name], golden(name)
    for case in data["cases"]:
        text = case["text"]
        assert vocab.encode(text, add_special=False, parse_special=False) == case["plain"], text
        assert vocab.encode(text) == case["special"], text
        assert vocab.decode_bytes(case["special"]) == case["bytes"].encode("latin-1"), text
        assert vocab.decode_bytes(case["special"], special=False) == case["shown"].encode("latin-1"), text


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpps_special_tokens(name: str, vocabs: dict[str, Vocab]) -> None:
    vocab, data = vocabs[name], golden(name)
    for role in (*special.KEYS, "nl"):
        found, expected = getattr(vocab, role), data["info"][role]
        if role == "eot" and found is not None:     # llama.cpp takes the one that comes first in its hash table
            found, expected = vocab.text(found) in special.NAMES[role], vocab.text(expected) in special.NAMES[role]
        assert expected == (-1 if found is None else found), role
    for flag in ("add_bos", "add_eos", "add_sep"):
        assert data["info"][flag] == getattr(vocab, flag), flag
    assert sorted(vocab.eog) == data["eog"]
    assert [i for i in range(vocab.n_vocab) if vocab.is_eog(i)] == data["eog"]


@pytest.mark.parametrize("name", KINDS)
@quick
@given(text=any_text)
def test_any_text_encodes(name: str, vocabs: dict[str, Vocab], text: str) -> None:
    vocab = vocabs[name]
    ids = vocab.encode(text)
    assert all(0 <= i < vocab.n_vocab for i in ids)
    assert vocab.encode(text) == ids
    vocab.decode(ids)


@quick
@given(text=st.text())
def test_byte_level_text_comes_back(vocabs: dict[str, Vocab], text: str) -> None:
    for name in ("bpe", "rwkv"):
        ids = vocabs[name].encode(text, add_special=False, parse_special=False)
        assert vocabs[name].decode(ids) == text
        assert b"".join(map(vocabs[name].piece, ids)) == text.encode()
    ids = vocabs["bpe-llama"].encode(text, add_special=False, parse_special=False)
    assert b"".join(map(vocabs["bpe-llama"].piece, ids)) == text.encode()    # its `decode` drops spaces before .,!?


@pytest.mark.parametrize("name", KINDS)
@quick
@given(data=st.data())
def test_the_stream_is_the_whole(name: str, vocabs: dict[str, Vocab], data: st.DataObject) -> None:
    vocab = vocabs[name]
    ids = data.draw(st.lists(st.integers(0, vocab.n_vocab - 1)))
    for shown in (True, False):
        stream, whole = vocab.stream_decoder(shown), b"".join(vocab.piece(i, shown) for i in ids)
        assert "".join(map(stream.push, ids)) + stream.finish() == whole.decode(errors="replace")


def test_a_character_in_three_tokens(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["rwkv"]
    find = {vocab.piece(i): i for i in range(vocab.n_vocab)}
    stream = vocab.stream_decoder()
    assert [stream.push(find[bytes([b])]) for b in "🦙".encode()] == ["", "", "", "🦙"]
    assert stream.push(find[b"\xf0"]) == ""
    assert stream.push(find[b"a"]) == "�a"
    assert stream.push(find[b"\xf0"]) + stream.finish() == "�"
    assert stream.push(find[b"b"]) + stream.finish() == "b"


def test_surrogates(vocabs: dict[str, Vocab]) -> None:
    for name in KINDS:
        encode = vocabs[name].encode
        assert encode("a\ud83d\ude42b") == encode("a🙂b")
        assert encode("a\ud83db") == encode("a\ufffdb")


def test_special_tokens_in_text(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["bpe"]
    im_end, tool = vocab.eos, next(i for i in range(vocab.n_vocab) if vocab.text(i) == "<tool_call>")
    assert im_end is not None and vocab.is_control(im_end) and not vocab.is_control(tool)
    assert vocab.encode("a<|im_end|>")[-1] == im_end
    assert im_end not in vocab.encode("a<|im_end|>", parse_special=False)
    assert tool in vocab.encode("a<tool_call>b", parse_special=False)       # user-defined: always
    assert vocab.decode([im_end, tool]) == "<|im_end|><tool_call>"
    assert vocab.decode([im_end, tool], special=False) == "<tool_call>"
    assert vocab.piece(im_end, special=False) == b""


def test_leading_space_belongs_to_a_running_text(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["spm"]
    ids = vocab.encode("Hello", add_special=False)
    assert vocab.decode(ids) == "Hello"
    stream = vocab.stream_decoder()
    assert "".join(map(stream.push, ids)) == " Hello"


def test_ids_out_of_range(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["bpe"]
    for bad in (-1, vocab.n_vocab):
        for use in (vocab.piece, vocab.text, vocab.is_control, lambda i: vocab.decode([i])):
            with pytest.raises(VocabError, match=f"token id {bad} is not in the vocabulary of {vocab.n_vocab} tokens"):
                use(bad)
        assert not vocab.is_eog(bad)


def test_open_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", **golden("bpe")["kv"])
    with gguf.File(path) as file:
        vocab = Vocab(file)
        other = Vocab(file, kv_overrides={"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eos_token_id": 7})
    assert (vocab.pre, other.pre, other.eos) == ("smollm", "llama-bpe", 7)
    assert vocab.encode("12345", False) != other.encode("12345", False)      # after the file was closed
    assert ggraph.Vocab is Vocab


def test_missing_and_unknown_pre(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kv = golden("bpe")["kv"]
    del kv["pre"]
    assert load(tmp_path, **kv).pre == "default"
    assert "does not name its pre-tokenizer" in capfd.readouterr().err
    vocab = load(tmp_path, **kv, pre="qwen99")
    error = capfd.readouterr().err
    assert "WARNING: unknown pre-tokenizer 'qwen99'" in error and "'llama-bpe'" in error
    assert vocab.encode("Hello") == load(tmp_path, **kv, pre="dbrx").encode("Hello")
    load(tmp_path, **kv, pre="default")
    assert capfd.readouterr().err == ""


def test_no_tokenizer(tmp_path: Path) -> None:
    test = load(tmp_path, model="test", tokens=["a", "b"])
    none = Vocab(write(tmp_path / "n.gguf", model="none"), kv_overrides={"llama.vocab_size": 5})
    assert (test.kind, test.n_vocab, none.kind, none.n_vocab) == ("test", 2, "none", 5)
    assert (test.bos, test.eos, test.nl, none.eog) == (None, None, None, frozenset())
    for vocab in (test, none):
        with pytest.raises(VocabError, match="has no tokenizer"):
            vocab.encode("a")
    assert test.decode([1]) == "1"
    with pytest.raises(VocabError, match="not in the vocabulary"):
        none.piece(0)


@pytest.mark.parametrize("changes, message", [
    (dict(model="plamo2"), "model is 'plamo2', a tokenizer that ggraph does not know"),
    (dict(model=None), "model is None"),
    (dict(model=["gpt2"]), "a tokenizer that ggraph does not know"),
    (dict(pre=3), "pre should be a name but is 3"),
    (dict(tokens=None), "no tokenizer.ggml.tokens"),
    (dict(tokens=[1, 2]), "tokens should be an array of strings but is ARRAY:INT32"),
    (dict(tokens=["a", "b", "a"]), "token 'a' is in the vocabulary twice"),
    (dict(merges=None), "no tokenizer.ggml.merges"),
    (dict(merges=[1]), "merges should be an array of strings"),
    (dict(token_type=[1, 1]), "token_type has 2 values for"),
    (dict(token_type=b"\1" * 455), "token_type should be ARRAY:INT32 but is ARRAY:UINT8"),
    (dict(scores=b"\1" * 455), "scores should be ARRAY:FLOAT32 or ARRAY:INT32 but is ARRAY:UINT8"),
    (dict(scores=[float("nan")] * 455), "scores holds values that are no numbers"),
    (dict(bos_token_id="x"), "bos_token_id should be a token id but is 'x'"),
    (dict(bos_token_id=True), "bos_token_id should be a token id"),
    (dict(add_bos_token=1), "add_bos_token should be true or false but is 1"),
])
def test_bad_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    kv = {key: value for key, value in {**golden("bpe")["kv"], **changes}.items() if value is not None}
    with pytest.raises(VocabError) as error:
        load(tmp_path, **kv)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["spm", "ugm", "bpe"])
def test_mutated_tables_give_a_vocab_or_a_typed_error(name: str, tmp_path: Path) -> None:
    kv, rng = golden(name)["kv"], random.Random(5)
    raw = [text.encode() for text in kv["tokens"]]
    for _ in range(25):
        mutated = {**kv, "tokens": [bytes(rng.randbytes(rng.randrange(9))) if rng.random() < 0.05 else t for t in raw]}
        for key in ("scores", "token_type", "merges", "precompiled_charsmap"):
            if key in kv and rng.random() < 0.4:
                mutated[key] = {"scores": [rng.gauss(0, 1e30) for _ in raw], "token_type": rng.choices(range(-1, 9), k=len(raw)),
                                "merges": [" ".join(rng.choices(kv["tokens"], k=rng.randrange(1, 4))) for _ in range(50)],
                                "precompiled_charsmap": rng.randbytes(rng.randrange(1, 60))}[key]
        try:
            vocab = load(tmp_path, **mutated)
            vocab.decode(vocab.encode("Hello <|im_end|> wörld\0\n 123"))
        except VocabError:
            pass


def test_special_ids_out_of_range_keep_the_default(tmp_path: Path) -> None:
    vocab = load_golden(tmp_path, "spm", bos_token_id=10_000, eos_token_id=2**32 - 1)
    assert (vocab.bos, vocab.eos, vocab.unk) == (1, 2, 0)
    tiny = load(tmp_path, model="gpt2", pre="gpt-2", tokens=["a"], merges=["a a"], add_bos_token=True)
    assert (tiny.bos, tiny.add_bos) == (None, False)        # the default, 11, does not exist
    assert tiny.encode("aa") == [0, 0]


def test_names_that_end_a_generation(tmp_path: Path) -> None:
    names = ["a", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "</s>", "<|tool_response>", "<eos>", "<|file_sep|>"]
    vocab = load(tmp_path, model="gpt2", pre="gpt-4o", tokens=names, merges=["a a"], eos_token_id=0)
    assert {vocab.text(i) for i in vocab.eog} == {"a", "<|return|>", "<|call|>", "<|tool_response>", "<eos>", "<|file_sep|>"}
    assert vocab.is_control(2) and not vocab.is_control(1) and not vocab.is_control(4) and not vocab.is_control(5)
    assert vocab.fim_sep == 8


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("unit", ["a", " ", "1", "\n", "'", "é", " a", "Ab ", "<|im_end|>", "中1"])
def test_long_texts_take_linear_time(name: str, unit: str, vocabs: dict[str, Vocab]) -> None:
    started = time.process_time()
    vocabs[name].encode(unit * (100_000 // len(unit)))
    assert time.process_time() - started < 3        # anything quadratic takes minutes


@pytest.mark.parametrize("pre", ["superbpe", "afmoe", "tiny_aya", "exaone-moe", "jais-2", "kimi-k2"])
@pytest.mark.parametrize("unit", ["1", "٣", "a1", "a", " "])
def test_long_texts_with_rules_that_look_ahead(pre: str, unit: str, tmp_path: Path) -> None:
    vocab = load_golden(tmp_path, "bpe", pre=pre)
    started = time.process_time()
    vocab.encode(unit * (100_000 // len(unit)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize("name, seconds", [("smollm2", 0.3), ("gemma3", 1.0)])
def test_real_vocabularies_open_quickly(name: str, seconds: float, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    Vocab(path).encode("x")     # imports
    started = time.process_time()
    vocab = Vocab(path)
    assert vocab.encode("Hello world", add_special=False) == {"smollm2": [19556, 905], "gemma3": [9259, 1902]}[name]
    assert time.process_time() - started < seconds
    assert np.array_equal(vocab.encode("x"), vocab.encode("x"))
