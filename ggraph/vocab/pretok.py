r"""Pre-tokenizer rules of byte-pair vocabularies, one row per name in `tokenizer.ggml.pre`.

In: the name. Out: a `Pre`: the regular expressions that cut text into words, and what else the name decides.
Must not know: tokens, ids, files.

Facts: llama.cpp, src/llama-vocab.cpp and src/unicode.cpp. The expressions are written for Oniguruma, which
`tokenizers` uses. Where they differ from what llama.cpp lists, they say what it does: it reads \p{Lu}, \p{Ll}, ... as
\p{L}, \d as [0-9], takes space characters out of expressions without \p, and replaces some lists by code.
"""
from __future__ import annotations

import re
from typing import NamedTuple

# Assigned after Unicode 15.1, on which llama.cpp's tables stand: letters, digits, ... to Oniguruma, nothing to it.
_NEWER = (
    r"\x{897}\x{1b4e}-\x{1b4f}\x{1b7f}\x{1c89}-\x{1c8a}\x{2427}-\x{2429}\x{31e4}-\x{31e5}\x{a7cb}-\x{a7cd}"
    r"\x{a7da}-\x{a7dc}\x{105c0}-\x{105f3}\x{10d40}-\x{10d8f}\x{10ec2}-\x{10efc}\x{11380}-\x{113e2}"
    r"\x{116d0}-\x{116e3}\x{11bc0}-\x{11bf9}\x{11f5a}\x{13460}-\x{143fa}\x{16100}-\x{16139}\x{16d40}-\x{16d79}"
    r"\x{18cff}\x{1cc00}-\x{1ceb3}\x{1e5d0}-\x{1e5ff}\x{1f8b2}-\x{1f8c1}\x{1fa89}-\x{1fa8f}\x{1fabe}\x{1fac6}"
    r"\x{1fadc}-\x{1fadf}\x{1fae9}\x{1fbcb}-\x{1fbef}")


def onig(regex: str) -> str:
    r"""The expression with its \p{...} classes cut back to Unicode 15.1."""
    return re.sub(r"\\p\{\w\}", lambda m: f"[{m[0]}&&[^{_NEWER}]]", regex)


class Pre(NamedTuple):
    """What a pre-tokenizer name decides. Each of `splits` cuts the pieces that the one before it left."""
    splits: tuple[str, ...]
    ignore_merges: bool = False     # a word that is a token needs no merges
    clean_spaces: bool = True       # decoding drops the space before punctuation
    add_bos: bool = False
    add_sep: bool = False
    has_bos: bool = True            # there is a default BOS id
    raw: bool = False               # tokens are UTF-8 with <0xXX> for bytes, not GPT-2's byte alphabet
    escape: bool = False            # spaces are written as U+2581
    newline_runs: bool = False      # a run of newlines that is a token needs no merges


NONE = Pre(())

_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
          r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACE)
_MARKED = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_SUFFIX}?|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACE
_HAN = (r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
        r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}")
_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCT = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_PUNCT_WORDS = rf"{_ASCII_PUNCT}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK_CJK = r"[[一-龥ࠀ-一가-퟿]&&\S]+"
_DEEPSEEK_LETTERS = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}"
    r"ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃")

# Digits in threes counted from the right, in one pass over each run. llama.cpp leaves what stands before a run at
# its first group. First the run is cut behind the digits that are over, then every three.
_THREES = (r"[^\p{N}]*+(?:\p{N}{1,2}(?=(?:\p{N}{3})++(?!\p{N}))|(?:\p{N}{3})++(?!\p{N})|\p{N}{1,2}(?!\p{N}))|[^\p{N}]+",
           r"[^\p{N}]*+\p{N}{3}|[^\p{N}]++\p{N}*")
# The same within runs of \p{N}, over ASCII digits: each three starts a piece, and what follows stays with it.
_TAIL = r"(?:[^0-9]|[0-9]{1,2}(?![0-9])|[0-9]{1,2}(?=(?:[0-9]{3})++(?![0-9])))"
_SUPER = (r"\p{N}+", rf"(?:[0-9]{{3}})++(?![0-9]){_TAIL}*|{_TAIL}+", r"[0-9]{3}(?=[0-9]{3})")

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_DIGITS = (r"\p{N}", *_GPT2)
_LLAMA3 = (rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}{_REST}",)
_QWEN2 = (rf"{_SUFFIX}|{_WORD}|\p{{N}}{_REST}",)
_QWEN35 = (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACE}",)
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA, rf"{_PUNCT_WORDS}[\r\n]*{_SPACE}")
_TEKKEN = (_CASED % ("", "", ""),)
_GPT4O = (_CASED % (f"{_SUFFIX}?", f"{_SUFFIX}?", "{1,3}"),)
_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = (r"[^\n]+|[\n]+",)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_RULES: tuple[tuple[str, Pre], ...] = (
    ("default", Pre(_DEFAULT)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     Pre(_LLAMA3, ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe", Pre(_LLAMA3)),
    ("chatglm-bpe", Pre(_LLAMA3, has_bos=False)),
    ("glm4 glm5", Pre(_LLAMA3, has_bos=False, ignore_merges=True)),
    ("jais-2", Pre((rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
                    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s",))),
    ("minicpm5", Pre((r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+{_REST}"), ignore_merges=True)),
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais exaone4",
     Pre(_GPT2)),
    ("trillion granite-docling", Pre(_GPT2, clean_spaces=False)),
    ("jina-v1-en jina-v2-code roberta-bpe", Pre(_GPT2, add_sep=True)),
    ("starcoder refact codeshell exaone minerva-7b mellum2", Pre(_DIGITS)),
    ("command-r smollm", Pre(_DIGITS, clean_spaces=False)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2", Pre(_QWEN2, clean_spaces=False)),
    ("stablelm2 megrez", Pre(_QWEN2)),
    ("qwen35", Pre(_QWEN35, clean_spaces=False)),
    ("ufakzeka", Pre((rf"{_WORD}|\p{{N}}{_REST}",), clean_spaces=False)),
    ("seed-coder", Pre((rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACE}",), clean_spaces=False)),
    ("bailingmoe bailingmoe2 llada-moe",
     Pre((rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]"
          r"|\s+(?!\S)|\s+",), clean_spaces=False)),
    ("exaone-moe", Pre((rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",))),
    ("laguna", Pre((*_LINES, *_QWEN2), clean_spaces=False)),
    ("tekken", Pre(_TEKKEN, clean_spaces=False, ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Pre(_GPT4O, clean_spaces=False)),
    ("granite-embed-multi-97m", Pre((_GPT4O[0].replace(r"[\p{L}&&", r"[[\p{L}\p{M}]&&"),), clean_spaces=False,
                                    ignore_merges=True)),
    ("tiny_aya cohere2moe", Pre((*_THREES, _MARKED % "{1,3}"), clean_spaces=False)),
    ("youtu", Pre((r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _KANA, _MARKED % ""), clean_spaces=False,
                  ignore_merges=True)),
    ("kimi-k2", Pre((rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SUFFIX}?|\p{{N}}{{1,3}}{_REST}",),
                    clean_spaces=False)),
    ("superbpe", Pre(_SUPER, clean_spaces=False)),
    ("afmoe", Pre((*_THREES, r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
                   rf"{_PUNCT_WORDS}[\r\n]*{_SPACE}"), clean_spaces=False)),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", Pre(_DEEPSEEK3, clean_spaces=False)),
    ("spark2_5", Pre((*_DEEPSEEK3[:2], rf"{_PUNCT_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"), clean_spaces=False)),
    ("deepseek-llm", Pre((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+\z",
                          _DEEPSEEK_CJK, r"\p{N}+"), clean_spaces=False)),
    ("deepseek-coder", Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"), clean_spaces=False)),
    ("falcon", Pre((r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]"))),
    ("chameleon", Pre((r"<sentinel:[0-9]+>", r"(?:IMGIMG)(?:A|B|C|D|E|F|G|H|I){1,4}Z", r"[\t\n]|    |  ", r"\p{N}",
                       r"[\p{P}!-/:-@\[-`{-~]", *_GPT2), clean_spaces=False, add_bos=True)),
    ("bloom gpt3-finnish", Pre((_WORDS,))),
    ("poro-chat", Pre((_WORDS,), clean_spaces=False)),
    ("viking", Pre((_WORDS, r"\p{N}"), clean_spaces=False)),
    ("whitespace", Pre((r"\S+",), raw=True)),
    ("gemma4 granite-embed-multi-311m", Pre(_LINES, raw=True, escape=True, newline_runs=True)),
    ("sarvam-moe", Pre(_LINES, raw=True, escape=True, clean_spaces=False)),
)
RULES: dict[str, Pre] = {name: pre for names, pre in _RULES for name in names.split()}
GUESS = "llama-bpe"     # what most vocabularies since 2024 are derived from
