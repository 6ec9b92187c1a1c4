"""What command lines of ggraph share: options under llama.cpp's names, grouped help, errors as one sentence.

In: what the user typed. Out: checked values, and the arguments for `ggraph.Model`, `ggraph.Context` and samplers made of
them. A tool picks the groups that it needs: `@options(MODEL, CONTEXT, ROPE, SAMPLING)`.
"""
from __future__ import annotations

import difflib
import errno
import io
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import click

import ggraph
from ggraph import env

F = TypeVar("F", bound=Callable[..., Any])
Params = dict[str, Any]
INTERRUPTED = 130       # exit code of a program that Ctrl-C ended: 128 + SIGINT
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SAMPLER_LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
                   "m": "min_p", "x": "xtc", "t": "temperature", "a": "adaptive_p"}


class IntRange(click.IntRange):
    """Called an integer, as in "'x' is not a valid integer"."""
    name = "integer"


class FloatRange(click.FloatRange):
    """A finite number."""
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class Option(click.Option):
    """An option of a group of the help."""

    def __init__(self, *args: Any, group: str = "Other", **kw: Any):
        super().__init__(*args, **kw)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)        # said in words
        return extra


class Command(click.Command):
    """Long help grouped by purpose. What goes wrong is told in one sentence: exit code 2 for what was typed, 1 for the rest."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for name, rows in sorted(groups.items(), key=lambda pair: pair[0] == "Other"):
            with formatter.section(name):
                formatter.write_dl(rows)

    def make_parser(self, ctx: click.Context) -> Any:
        """Names are llama.cpp's, several letters after one dash: "-mli" is a misspelt name, and neither "-m li" nor -m -l -i.
        Only a number may follow at once (-n5)."""
        parser: Any = super().make_parser(ctx)
        letter = parser._match_short_opt        # what click tries where no name fits

        def match(arg: str, state: Any) -> None:
            if len(arg) > 2 and not re.match(r"[-+.]?\d", arg[2:]):
                known = [name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
                raise click.NoSuchOption(arg, possibilities=difflib.get_close_matches(arg, known), ctx=ctx)
            letter(arg, state)
        parser._match_short_opt = match
        return parser

    def main(self, *args: Any, **kw: Any) -> Any:
        _mend_streams()
        return super().main(*args, **kw)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            env.debug()             # a wrong value is told before anything is done
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except ggraph.Error as e:
            _fail(ctx, e, str(e))
        except OSError as e:
            if e.errno == errno.EPIPE:      # the reader has left, as in `| head`
                raise
            _fail(ctx, e, f"{e.filename}: {e.strerror}" if e.filename else e.strerror or str(e))
        except MemoryError as e:
            _fail(ctx, e, "out of memory; try a smaller context (-c), a smaller batch (-ub) or a smaller model")
        except Exception as e:
            _fail(ctx, e, f"unexpected {type(e).__name__}: {e}; GGRAPH_DEBUG=1 shows where. Please report it")


def _mend_streams() -> None:
    """Closed streams are as /dev/null. What a terminal cannot show, or sends wrongly, becomes a replacement mark."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(ctx: click.Context, error: BaseException, message: str) -> NoReturn:
    try:
        debugging = env.debug() > 0
    except ggraph.Error:            # its value is what is wrong
        debugging = False
    if debugging:
        raise error
    click.echo(f"error: {message}", err=True)
    ctx.exit(1)


def options(*groups: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Decorator: the options of these groups, in this order."""
    def add(function: F) -> F:
        for one in reversed([option for group in groups for option in group]):
            function = one(function)
        return function
    return add


def group(name: str) -> Callable[..., Callable[[F], F]]:
    """A maker of options of the group `name`."""
    def option(*names: str, **kw: Any) -> Callable[[F], F]:
        return click.option(*names, cls=Option, group=name, **kw)
    return option


# --- values --------------------------------------------------------------------------------------------------------


def overrides(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> Params:
    """key=int:1,key=str:x -> {key: value}"""
    makers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str,
                                               "bool": lambda text: {"true": True, "false": False}[text]}
    found: Params = {}
    for item in (item for value in values for item in value.split(",")):
        key, _, typed = item.partition("=")
        kind, _, text = typed.partition(":")
        try:
            found[key] = makers[kind](text)
        except (KeyError, ValueError):
            raise click.BadParameter(f"{item!r} is not KEY=TYPE:VALUE with TYPE int, float, bool (true, false) or str") from None
    return found


def _buffers(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """ffn_=CPU,blk.1=CUDA0 -> {pattern: buffer}"""
    found = {}
    for item in (item for value in values for item in value.split(",")):
        pattern, _, buffer = item.rpartition("=")
        if not pattern or not buffer:
            raise click.BadParameter(f"{item!r} is not PATTERN=BUFFER, as in ffn_.*_exps=CPU")
        found[pattern] = buffer
    return found


def _layers(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not (value.isdigit() or value in ("all", "auto", "-1")):
        raise click.BadParameter(f"{value!r} is not a number, all or auto")
    return value


def _scaled(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[tuple[str, float]]:
    """a.gguf:0.5,b.gguf:2 -> [(a.gguf, 0.5), (b.gguf, 2.0)]"""
    found = []
    for item in (item for value in values for item in value.split(",")):
        path, _, scale = item.rpartition(":")
        try:
            found.append((path, float(scale)))
        except ValueError:
            path = ""
        if not path:
            raise click.BadParameter(f"{item!r} is not FILE:SCALE")
    return found


def _unscaled(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[tuple[str, float]]:
    """a.gguf,b.gguf -> [(a.gguf, 1.0), (b.gguf, 1.0)]"""
    return [(item, 1.0) for value in values for item in value.split(",")]


def _biases(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[int, float]:
    """15043+1 -> {15043: 1.0}"""
    found: dict[int, float] = {}
    for value in values:
        parts = re.fullmatch(r"(\d+)([+-].+)", value.replace(" ", ""))
        try:
            found[int(parts[1])] = float(parts[2])  # type: ignore[index]
        except (TypeError, ValueError):
            raise click.BadParameter(f"{value!r} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS, as in 15043+1 or 2-inf") from None
    return found


def _sequence(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """edkypmxt -> penalties;dry;..."""
    if value is None:
        return None
    if unknown := set(value) - set(SAMPLER_LETTERS):
        raise click.BadParameter(f"{sorted(unknown)[0]!r} is no sampler; letters: "
                                 + ", ".join(f"{k} {v}" for k, v in SAMPLER_LETTERS.items()))
    return ";".join(SAMPLER_LETTERS[letter] for letter in value)


def unescape(text: str) -> str:
    """Replace \\n, \\r, \\t, \\', \\", \\\\ and \\xHH by what they stand for; other backslashes stay."""
    plain = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}

    def one(found: re.Match[bytes]) -> bytes:
        return plain[found[1]] if found[1] in plain else bytes([int(found[1][1:], 16)])
    return re.sub(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])", one, text.encode(errors="surrogatepass")).decode(errors="replace")


# --- groups --------------------------------------------------------------------------------------------------------

_model, _context, _rope, _sampling = group("Model"), group("Context and speed"), group("Positions"), group("Sampling")

OFFLOAD = (
    _model("n_gpu_layers", "-ngl", "--gpu-layers", "--n-gpu-layers", default="auto", callback=_layers, metavar="N",
           help="Layers on a GPU, the output counted as one: a number, all, or auto: as many as its memory holds with their "
           "cache and the arena.  [default: auto, which takes a GPU only if -dev or GGRAPH_BACKEND=cuda names one]"),
    _model("override_tensor", "-ot", "--override-tensor", multiple=True, callback=_buffers, metavar="PATTERN=BUFFER",
           help="Where weights go whose name the pattern matches: CPU or CUDA0. Several: repeat, or join by commas."),
    _model("device", "-dev", "--device", metavar="NAME", help="The GPU to use: CUDA0; or none."),
)
MODEL = (
    _model("-m", "--model", default="smollm2", show_default=True, metavar="MODEL",
           help="A GGUF file, a known name (smollm2, gemma3-270m) or hf:owner/repo/file.gguf."),
    _model("kv_overrides", "--override-kv", multiple=True, callback=overrides, metavar="KEY=TYPE:VALUE",
           help="Replace metadata of the file; types int, float, bool, str. Several: repeat, or join by commas."),
    _model("--repack", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
           help="Rearrange weights for speed: once more their size in memory, unless too little is free."),
    *OFFLOAD,
    _model("--lora", multiple=True, callback=_unscaled, metavar="FILE",
           help="A LoRA (GGUF). Several: repeat, or join by commas."),
    _model("--lora-scaled", multiple=True, callback=_scaled, metavar="FILE:SCALE", help="A LoRA at this scale. Several: as above."),
    _model("--control-vector", multiple=True, callback=_unscaled, metavar="FILE",
           help="A control vector (GGUF). Several: as above."),
    _model("--control-vector-scaled", multiple=True, callback=_scaled, metavar="FILE:SCALE",
           help="A control vector at this scale. Several: as above."),
    _model("--control-vector-layer-range", nargs=2, type=IntRange(min=1), metavar="FIRST LAST",
           help="Layers that control vectors are for.  [default: all that they have]"),
)

CONTEXT = (
    _context("n_ctx", "-c", "--ctx-size", type=IntRange(min=0), default=0, metavar="N",
             help="Tokens that the context holds.  [default: the model's own]"),
    _context("n_batch", "-b", "--batch-size", type=IntRange(min=1), default=2048, show_default=True, metavar="N",
             help="Tokens that are processed together, at most."),
    _context("n_ubatch", "-ub", "--ubatch-size", type=IntRange(min=1), default=512, show_default=True, metavar="N",
             help="Tokens of one graph run, at most."),
    _context("n_threads", "-t", "--threads", type=int, default=-1, metavar="N",
             help="Threads while writing.  [default: all cores]"),
    _context("n_threads_batch", "-tb", "--threads-batch", type=int, default=-1, metavar="N",
             help="Threads while reading the prompt.  [default: as --threads]"),
    _context("flash_attn", "-fa", "--flash-attn", type=click.Choice(["on", "off", "auto"]), default="auto",
             show_default=True, help="Attention as one op, or as its parts."),
    _context("type_k", "-ctk", "--cache-type-k", type=click.Choice(KV_TYPES), default="f16", metavar="TYPE",
             help=f"Type of K in the cache: {', '.join(KV_TYPES)}.  [default: f16]"),
    _context("type_v", "-ctv", "--cache-type-v", type=click.Choice(KV_TYPES), default="f16", metavar="TYPE",
             help="Type of V in the cache.  [default: f16]"),
    _context("kv_unified", "-kvu/-no-kvu", "--kv-unified/--no-kv-unified", default=True,
             help="One pool of cells for all sequences.  [default: on]"),
    _context("--swa-full", is_flag=True, help="Keep all cells of sliding-window layers, so that more can be reused."),
    _context("offload_kqv", "-kvo/-nkvo", "--kv-offload/--no-kv-offload", default=True,
             help="Keep K, V and states of a layer on the device that has its weights.  [default: on]"),
    _context("graph_reuse", "--graph-reuse/--no-graph-reuse", default=True,
             help="Keep built graphs for batches of the same form.  [default: on]"),
)
_CONTEXT = ("n_ctx", "n_batch", "n_ubatch", "flash_attn", "type_k", "type_v", "kv_unified", "swa_full", "offload_kqv",
            "graph_reuse")
_MODEL = ("kv_overrides", "repack", "n_gpu_layers", "override_tensor", "device")

_positive, _any = FloatRange(min=0), FloatRange()
_ROPE: dict[str, tuple[Any, str]] = {
    "rope-scaling": (click.Choice(["none", "linear", "yarn"]), "How positions beyond the trained context are scaled."),
    "rope-scale": (_positive, "Context scaling factor: expands the context by it."),
    "rope-freq-base": (_positive, "Base frequency."),
    "rope-freq-scale": (_positive, "Frequency scaling factor: expands the context by 1/N."),
    "yarn-orig-ctx": (IntRange(min=0), "YaRN: context that the model was trained with."),
    "yarn-ext-factor": (_any, "YaRN: mix of extrapolation; 0 interpolates all."),
    "yarn-attn-factor": (_any, "YaRN: scale of attention."),
    "yarn-beta-slow": (_any, "YaRN: high correction dimension."),
    "yarn-beta-fast": (_any, "YaRN: low correction dimension."),
}
ROPE = [_rope(f"--{name}", type=kind, metavar=None if name == "rope-scaling" else "N",
              help=text + "  [default: the file's]") for name, (kind, text) in _ROPE.items()]

_SAMPLING: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "seed": (IntRange(-1, 2**32 - 1), ("-s", "--seed"), "Seed of the random draws; -1: a fresh one, which is then told."),
    "samplers": (str, ("--samplers",), "Samplers in this order, joined by ';'."),
    "temp": (float, ("--temp", "--temperature"), "Temperature; 0 always takes the likeliest token."),
    "top_k": (int, ("--top-k",), "Keep the N likeliest tokens; 0: all."),
    "top_p": (float, ("--top-p",), "Keep the likeliest tokens that together reach N; 1: all."),
    "min_p": (float, ("--min-p",), "Keep tokens with at least N times the best one's probability; 0: all."),
    "top_n_sigma": (float, ("--top-nsigma", "--top-n-sigma"), "Keep tokens within N standard deviations of the best; -1: all."),
    "typical": (float, ("--typical", "--typical-p"), "Locally typical sampling; 1: off."),
    "xtc_probability": (float, ("--xtc-probability",), "How often XTC excludes top choices; 0: never."),
    "xtc_threshold": (float, ("--xtc-threshold",), "Probability from which XTC calls a token a top choice."),
    "repeat_last_n": (int, ("--repeat-last-n",), "Tokens that penalties look back; 0: off."),
    "repeat_penalty": (float, ("--repeat-penalty",), "Penalize repeated tokens; 1: off."),
    "presence_penalty": (float, ("--presence-penalty",), "Penalize tokens that are there already; 0: off."),
    "frequency_penalty": (float, ("--frequency-penalty",), "Penalize tokens by how often they are there; 0: off."),
    "dry_multiplier": (float, ("--dry-multiplier",), "Penalize repeated runs of tokens (DRY); 0: off."),
    "dry_base": (float, ("--dry-base",), "DRY: how fast the penalty grows with the run."),
    "dry_allowed_length": (int, ("--dry-allowed-length",), "DRY: longest run without a penalty."),
    "dry_penalty_last_n": (int, ("--dry-penalty-last-n",), "DRY: tokens to look back; 0: off."),
    "adaptive_target": (float, ("--adaptive-target",), "adaptive-p: probability to aim at; negative: off."),
    "adaptive_decay": (float, ("--adaptive-decay",), "adaptive-p: how slowly the target adapts."),
    "dynatemp_range": (float, ("--dynatemp-range",), "Dynamic temperature: this much below and above; 0: off."),
    "dynatemp_exp": (float, ("--dynatemp-exp",), "Dynamic temperature: exponent."),
    "mirostat": (IntRange(0, 2), ("--mirostat",), "Mirostat 1 or 2 in place of the other samplers; 0: off."),
    "mirostat_lr": (float, ("--mirostat-lr",), "Mirostat: learning rate (eta)."),
    "mirostat_ent": (float, ("--mirostat-ent",), "Mirostat: target entropy (tau)."),
}


class _SamplingOption(Option):
    """Without a value of its own, so that the file's defaults hold; the help tells llama.cpp's."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        assert record is not None
        return record[0], f"{record[1]}  [default: {ggraph.LLM.SAMPLING[self.name]}]"


def _sampling_option(name: str, kind: Any, flags: Sequence[str], text: str) -> Callable[[F], F]:
    return click.option(name, *flags, cls=_SamplingOption, group="Sampling", type=kind, metavar="LIST" if kind is str else "N",
                        help=text)


SAMPLING = (
    *(_sampling_option(name, *row) for name, row in _SAMPLING.items()),
    _sampling("sampler_seq", "--sampler-seq", "--sampling-seq", callback=_sequence, metavar="LETTERS",
              help="The same as --samplers in letters, such as edskypmxt."),
    _sampling("dry_breakers", "--dry-sequence-breaker", multiple=True, metavar="TEXT",
              help="DRY: runs end at this text; 'none': at no text. May be repeated.  [default: newline, ':', '\"', '*']"),
    _sampling("logit_bias", "-l", "--logit-bias", multiple=True, callback=_biases, metavar="ID(+/-)BIAS",
              help="Make a token likelier (15043+1) or less likely (15043-1, 15043-inf). May be repeated."),
    _sampling("--ignore-eos", is_flag=True, help="Never end by itself."),
)


# --- what is made of them ------------------------------------------------------------------------------------------


def model_arguments(p: Params) -> Params:
    """Arguments of `ggraph.Model` from MODEL, but for its path."""
    return {name: p[name] for name in _MODEL}


def context_arguments(p: Params) -> Params:
    """Arguments of `ggraph.Context` from CONTEXT and ROPE, and the adapters of MODEL."""
    rope = {name.replace("-", "_").removeprefix("rope_"): p[name.replace("-", "_")] for name in _ROPE}
    return {**{name: p[name] for name in _CONTEXT}, "rope": {k: v for k, v in rope.items() if v is not None} or None,
            "adapters": _adapters(p), "n_threads": _count(p["n_threads"]), "n_threads_batch": _count(p["n_threads_batch"])}


def _adapters(p: Params) -> list[tuple[ggraph.Adapter, float]]:
    loras = [(ggraph.Adapter(path), scale) for path, scale in p["lora"] + p["lora_scaled"]]
    return loras + [(ggraph.Adapter(path, layer_range=p["control_vector_layer_range"]), scale)
                    for path, scale in p["control_vector"] + p["control_vector_scaled"]]


def _count(n: int) -> int | None:
    return n if n > 0 else None


def sampling_arguments(p: Params, escape: bool) -> Params:
    """Arguments of `ggraph.LLM.sampler` from SAMPLING; None where the user said nothing."""
    given = {name: p[name] for name in _SAMPLING} | {"ignore_eos": p["ignore_eos"], "logit_bias": p["logit_bias"] or None}
    if p["sampler_seq"] is not None:
        given["samplers"] = p["sampler_seq"]
    if p["dry_breakers"]:
        breakers = [b for b in p["dry_breakers"] if b != "none"]
        given["dry_breakers"] = [unescape(b) for b in breakers] if escape else breakers
    return given
