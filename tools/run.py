"""ggraph-run: continue a text with a model, or chat with it.

In: a command line. Out: text on standard output, everything else on standard error, an exit code.
"""
from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import click

import ggraph
from ggraph import env, hub

from ._answer import Writer
from ._chat import Chat
from ._console import Bars, show_sizes, show_timings
from ._input import read_text
from ._options import (
    CONTEXT,
    INTERRUPTED,
    MODEL,
    ROPE,
    SAMPLING,
    Command,
    IntRange,
    Params,
    context_arguments,
    group,
    model_arguments,
    options,
    unescape,
)
from ._speculative import SPECULATIVE, TREE, drafting, n_rollback

_prompt, _chat, _form, _output = group("Prompt and length"), group("Chat"), group("Form of the text"), group("Output")
_file = click.Path(exists=True, dir_okay=False, allow_dash=True)

PROMPT = (
    _prompt("-p", "--prompt", metavar="TEXT", help="The text to continue; with -cnv the first message."),
    _prompt("-f", "--file", type=_file, help="A file with the prompt; - is standard input."),
    _prompt("-e/-no-e", "--escape/--no-escape", "escape", default=True,
            help=r"In the prompt and in -r, \n, \r, \t, \', \", \\ and \xHH stand for characters.  [default: on]"),
    _prompt("n_predict", "-n", "--predict", "--n-predict", type=IntRange(min=-2), default=-1, metavar="N",
            help="Tokens to write; -1: until the model ends the text, -2: or until the context is full.  [default: -1]"),
    _prompt("--keep", type=IntRange(min=-1), default=0, metavar="N",
            help="Tokens of the prompt that a context shift keeps; -1: all.  [default: 0]"),
    _prompt("--context-shift/--no-context-shift", default=False,
            help="When the context is full, drop half of it and go on.  [default: off]"),
    _prompt("-r", "--reverse-prompt", multiple=True, metavar="TEXT", help="Stop before this text. May be repeated."),
)
CHAT = (
    _chat("-cnv/-no-cnv", "--conversation/--no-conversation", "conversation", default=None,
          help="Chat through the model's template.  [default: when there is no prompt, or with -st or -sys]"),
    _chat("-st", "--single-turn", is_flag=True, help="One message, one answer."),
    _chat("-sys", "--system-prompt", metavar="TEXT", help="The system prompt."),
    _chat("-sysf", "--system-prompt-file", type=_file, help="A file with the system prompt."),
    _chat("--chat-template", metavar="JINJA", help="Use this template instead of the file's."),
    _chat("--chat-template-file", type=_file, help="Use the template in this file."),
    _chat("--chat-template-kwargs", metavar="JSON", help="""More values for the template, as in '{"enable_thinking": false}'."""),
)
FORM = (
    _form("--grammar", metavar="GBNF", help="Write what this grammar describes (llama.cpp's GBNF; it begins at root)."),
    _form("--grammar-file", type=_file, help="A file with the grammar."),
    _form("-j", "--json-schema", metavar="SCHEMA", help="Write JSON of this schema; {}: any."),
    _form("-jf", "--json-schema-file", type=_file, help="A file with the schema."),
)
OUTPUT = (
    _output("--display-prompt/--no-display-prompt", default=True, help="Write the prompt before its continuation.  [default: on]"),
    _output("--verbose-prompt", is_flag=True, help="Show the tokens of the prompt."),
    _output("-sp", "--special", is_flag=True, help="Write control tokens, too."),
    _output("--json", is_flag=True, help="Write each answer as one line of JSON: text, tokens, reason to end, timings."),
    _output("-q", "--quiet", is_flag=True, help="No sizes, bars and timings on standard error."),
)

ONE_OF = {"PROMPT, --prompt and --file": ("text", "prompt", "file"), "--samplers and --sampler-seq": ("samplers", "sampler_seq"),
          "--system-prompt and --system-prompt-file": ("system_prompt", "system_prompt_file"),
          "--chat-template and --chat-template-file": ("chat_template", "chat_template_file"),
          "--grammar, --grammar-file, --json-schema and --json-schema-file":
              ("grammar", "grammar_file", "json_schema", "json_schema_file")}


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("text", required=False, metavar="[PROMPT]")
@options(PROMPT, MODEL, CHAT, CONTEXT, SAMPLING, FORM, SPECULATIVE, TREE, ROPE, OUTPUT)
@click.version_option(ggraph.__version__)
@click.pass_context
def main(ctx: click.Context, /, **p: Any) -> None:
    """Continue PROMPT with a model; without a prompt, chat with it.

    Ctrl-C ends the text in good order. Exit code: 0, 1 where something failed, 2 for a wrong command line, 130 after
    Ctrl-C outside a chat.
    """
    env.set_quiet(p["quiet"])
    prompt, system = _check(p)
    chat = p["conversation"] if p["conversation"] is not None else prompt is None or p["single_turn"] or bool(system)
    if not chat and prompt is None:
        raise click.UsageError("without a chat there must be a prompt: give a text, -p or -f")
    with Bars(p["quiet"]) as bars, _loaded(p, chat, bars) as writer:
        whole = _converse(writer, p, prompt, system) if chat else _continue(writer, p, prompt or "")
        if writer.timings is not None:
            show_timings(writer.load_ms, writer.timings)
    if not whole:
        ctx.exit(INTERRUPTED)


def _check(p: Params) -> tuple[str | None, str | None]:
    """Prompt and system prompt; UsageError for options that exclude one another or are no JSON."""
    for what, names in ONE_OF.items():
        if sum(p[name] is not None for name in names) > 1:
            raise click.UsageError(f"give only one of {what}")
    try:
        p["chat_template_kwargs"] = json.loads(p["chat_template_kwargs"] or "{}")
    except ValueError as e:
        raise click.BadParameter(f"not JSON: {e}", param_hint="--chat-template-kwargs") from None
    if not isinstance(p["chat_template_kwargs"], dict):
        raise click.BadParameter("must be a JSON object", param_hint="--chat-template-kwargs")
    if p["spec_type"] == "none" and p["spec_draft_n_branch"] > 1:
        raise click.UsageError("--spec-draft-n-branch needs guesses: give --spec-type")
    if p["spec_type"] == "draft-simple" and not p["spec_draft_model"]:
        raise click.UsageError("--spec-type draft-simple needs a draft model: give -md")
    prompt = p["text"] if p["text"] is not None else p["prompt"]
    if p["file"]:
        prompt = read_text(p["file"])
    system: str | None = read_text(p["system_prompt_file"]) if p["system_prompt_file"] else p["system_prompt"]
    return unescape(prompt) if prompt and p["escape"] else prompt, system


@contextlib.contextmanager
def _loaded(p: Params, chat: bool, bars: Bars) -> Iterator[Writer]:
    """Model and context, open."""
    start = time.perf_counter()
    path = hub.resolve(p["model"], lambda done, total: bars("fetch", done, total))
    with ggraph.Model(path, **model_arguments(p)) as model:
        template = _template(p, model)
        if chat and template is None:
            raise ggraph.TemplateError(f"{path.name} has no chat template: give a prompt to continue, or --chat-template-file")
        context = {**context_arguments(p), "n_rollback": n_rollback(p), "n_seq_max": p["spec_draft_n_branch"]}
        with ggraph.LLM(model, chat_template=template, progress=bars, **context) as llm, drafting(p, llm, bars) as draft:
            bars.close()
            writer = Writer(llm, p, bars, 1e3 * (time.perf_counter() - start), draft)
            show_sizes(llm.ctx)
            env.log(f"seed {writer.seed}")
            yield writer


def _template(p: Params, model: ggraph.Model) -> ggraph.ChatTemplate | None:
    source = read_text(p["chat_template_file"]) if p["chat_template_file"] else p["chat_template"]
    if not source:
        return model.chat_template
    vocab = model.vocab
    bos, eos = ("" if i is None else vocab.text(i) for i in (vocab.bos, vocab.eos))
    return ggraph.ChatTemplate(source, bos_token=bos, eos_token=eos)


def _continue(writer: Writer, p: Params, prompt: str) -> bool:
    """Plain completion; False if Ctrl-C ended it."""
    generation = writer.llm.generate(prompt, **writer.options())
    writer.show_tokens(generation.prompt)
    if p["display_prompt"] and not p["json"]:
        click.echo(prompt, nl=False)
    return writer.write(generation)


def _converse(writer: Writer, p: Params, first: str | None, system: str | None) -> bool:
    chat = Chat(writer, system, p["chat_template_kwargs"])
    if p["single_turn"]:
        return chat.once(first)
    chat.run(first)
    return True


if __name__ == "__main__":
    main()
