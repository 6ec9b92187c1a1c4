"""The command line of ggraph-server: options under llama-server's names, environment variables LLAMA_ARG_* as well.

In: what the user typed. Out: a running server; exit code 0 after a signal.
"""
from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any

import click

import ggraph
from ggraph import env, hub

from .._console import Bars, show_sizes
from .._input import read_text
from .._options import (
    CONTEXT,
    MODEL,
    ROPE,
    SAMPLING,
    Command,
    Params,
    context_arguments,
    group,
    model_arguments,
    options,
    sampling_arguments,
)
from .._speculative import SPECULATIVE
from .speculative import DRAFT, Types, guesser, most, n_rollback, types

_server, _chat, _output = group("Server"), group("Chat"), group("Output")
_file = click.Path(exists=True, dir_okay=False)
GRACE = 5       # seconds that requests have to end, once the server is to stop



def _prefix(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value and not (value.startswith("/") and value.strip("/") and not value.endswith("/")):
        raise click.BadParameter(f"{value!r} must begin with a slash and end with none, as /llm does")
    return value


SERVER = (
    _server("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen at."),
    _server("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, metavar="N", help="Port; 0: any free one."),
    _server("n_parallel", "-np", "--parallel", type=click.IntRange(min=-1), default=-1, metavar="N",
            help="Slots: requests that run together.  [default: 4]"),
    _server("-a", "--alias", metavar="NAME", help="Name of the model in answers.  [default: the file's name]"),
    _server("api_key", "--api-key", multiple=True, metavar="KEY",
            help="Key that requests must bring; several: repeat, or join by commas."),
    _server("--api-key-file", type=_file, help="A file with one key a line."),
    _server("timeout", "-to", "--timeout", type=click.IntRange(min=1), default=3600, show_default=True, metavar="S",
            help="Seconds that a client may stall while it sends its request, or instead of reading the answer."),
    _server("--api-prefix", default="", callback=_prefix, metavar="PREFIX",
            help="Serve everything, the page too, below this path, such as /llm.  [default: no prefix]"),
    _server("--ssl-key-file", type=_file, help="Speak HTTPS: a file with the private key (PEM)."),
    _server("--ssl-cert-file", type=_file, help="And one with its certificate (PEM)."),
    _server("--cors-origins", default="localhost", show_default=True, metavar="LIST",
            help="Pages that may use the server: localhost, *, or origins joined by commas."),
    _server("--ui/--no-ui", "--webui/--no-webui", "ui", default=True, help="The page at /.  [default: on]"),
    _server("--inspect/--no-inspect", default=False,
            help="Show what happens inside of a request, in the page and at /ggraph/inspect.  [default: off]"),
    _server("--sse-ping-interval", type=click.IntRange(min=-1), default=30, show_default=True, metavar="S",
            help="Seconds of silence after which a stream sends a comment; -1: never."),
    _server("--slots/--no-slots", default=True, help="Show the slots at /slots.  [default: on]"),
    _server("--metrics/--no-metrics", default=False, help="Prometheus metrics at /metrics.  [default: off]"),
    _server("--props/--no-props", default=False, help="Accept POST /props.  [default: off]"),
    _server("--slot-save-path", type=click.Path(exists=True, file_okay=False, writable=True), help="Folder for saved slots."),
    _server("--cache-prompt/--no-cache-prompt", default=True, help="Reuse what a slot holds of a prompt.  [default: on]"),
    _server("--cache-reuse", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
            help="Move at least N tokens in a row that a slot holds to where a prompt has them, so that they are not evaluated "
                 "again; answers may then differ. 0: off."),
    _server("n_checkpoints", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", type=click.IntRange(min=0), default=32,
            show_default=True, metavar="N", help="States that a prompt leaves in --cache-ram where memory cannot go back."),
    _server("checkpoint_step", "-cms", "--checkpoint-min-step", type=click.IntRange(min=0), default=8192, show_default=True,
            metavar="N", help="Tokens between two such states; 0: only where they are known to be of use."),
    _server("cache_ram", "-cram", "--cache-ram", type=click.IntRange(min=-1), default=8192, show_default=True, metavar="MIB",
            help="Host memory for what slots had to forget, and for checkpoints; 0: none, -1: no limit."),
    _server("--embedding/--no-embedding", "--embeddings/--no-embeddings", "embedding", default=False,
            help="Serve embeddings, and nothing else.  [default: off]"),
    _server("--rerank/--no-rerank", "--reranking/--no-reranking", "rerank", default=False,
            help="Serve reranking, and nothing else: the model must be a reranker.  [default: off]"),
    _server("--pooling", type=click.Choice(["none", "mean", "cls", "last", "rank"]),
            help="Pooling of embeddings.  [default: the model's]"),
    _server("--embd-normalize", type=int, default=2, show_default=True, metavar="N",
            help="Norm of embeddings; -1: none, 0: the largest is 32760, 2: length 1."),
    _server("n_predict", "-n", "--predict", "--n-predict", type=click.IntRange(min=-1), default=-1, metavar="N",
            help="Tokens of an answer, at most, where the request says nothing.  [default: no limit]"),
    _server("--context-shift/--no-context-shift", default=False,
            help="When a slot is full, drop half of it and go on.  [default: off]"),
    _server("-r", "--reverse-prompt", multiple=True, metavar="TEXT", help="Stop before this text. May be repeated."),
)
CHAT = (
    _chat("--chat-template", metavar="JINJA", help="Use this template instead of the file's."),
    _chat("--chat-template-file", type=_file, help="Use the template in this file."),
    _chat("--chat-template-kwargs", metavar="JSON", help="""More values for the template, as in '{"enable_thinking": false}'."""),
    _chat("--jinja/--no-jinja", default=True, help="Accepted for llama-server's sake; templates are always Jinja."),
    _chat("--reasoning-format", type=click.Choice(["auto", "none", "deepseek", "deepseek-legacy"]), default="auto",
          show_default=True, help="none leaves thoughts in the content."),
    _chat("-rea", "--reasoning", type=click.Choice(["on", "off", "auto"]), default="auto", show_default=True,
          help="Let the template ask for thoughts: it is given enable_thinking; auto leaves that to it."),
    _chat("--reasoning-effort", metavar="WORD",
          help="How much to think, for templates that know it, such as low or high; none: not at all."),
    _chat("--reasoning-budget", type=click.IntRange(min=-1), default=-1, show_default=True, metavar="N",
          help="Tokens of a thought, at most, where the request says nothing; -1: any number."),
    _chat("--reasoning-budget-message", default="", metavar="TEXT", help="Said before a thought is ended."),
    _chat("--prefill-assistant/--no-prefill-assistant", default=True,
          help="An assistant's message at the end is the start of the answer.  [default: on]"),
)
OUTPUT = (
    _output("-q", "--quiet", is_flag=True, help="No sizes, bars and log on standard error."),
    _output("--log-requests", is_flag=True, help="A line for each request: method, path, status."),
    _output("-v", "--verbose", is_flag=True,
            help="More log: --log-requests, what each slot found of its prompt in a cache, and why not more."),
)
# Parameter -> the end of its environment variable's name, LLAMA_ARG_...; what is typed wins.
ENVIRONMENT = {
    "model": "MODEL", "n_ctx": "CTX_SIZE", "n_parallel": "N_PARALLEL", "n_batch": "BATCH", "n_ubatch": "UBATCH",
    "n_threads": "THREADS", "flash_attn": "FLASH_ATTN", "type_k": "CACHE_TYPE_K", "type_v": "CACHE_TYPE_V",
    "kv_unified": "KV_UNIFIED", "swa_full": "SWA_FULL", "repack": "REPACK", "n_gpu_layers": "N_GPU_LAYERS",
    "override_tensor": "OVERRIDE_TENSOR", "device": "DEVICE", "offload_kqv": "KV_OFFLOAD", "host": "HOST",
    "port": "PORT", "api_prefix": "API_PREFIX", "ssl_key_file": "SSL_KEY_FILE", "ssl_cert_file": "SSL_CERT_FILE",
    "alias": "ALIAS", "api_key_file": "API_KEY_FILE", "timeout": "TIMEOUT", "cors_origins": "CORS_ORIGINS",
    "sse_ping_interval": "SSE_PING_INTERVAL", "slots": "ENDPOINT_SLOTS", "metrics": "ENDPOINT_METRICS",
    "props": "ENDPOINT_PROPS", "ui": "UI", "cache_ram": "CACHE_RAM", "cache_reuse": "CACHE_REUSE",
    "n_checkpoints": "CTX_CHECKPOINTS",
    "checkpoint_step": "CHECKPOINT_MIN_SPACING_NT", "spec_type": "SPEC_TYPE", "spec_draft_model": "SPEC_DRAFT_MODEL",
    "spec_draft_n_max": "SPEC_DRAFT_N_MAX", "spec_draft_n_min": "SPEC_DRAFT_N_MIN", "spec_draft_p_min": "SPEC_DRAFT_P_MIN",
    "spec_draft_ngl": "N_GPU_LAYERS_DRAFT", "spec_draft_type_k": "SPEC_DRAFT_CACHE_TYPE_K",
    "spec_draft_type_v": "SPEC_DRAFT_CACHE_TYPE_V",
    "cache_prompt": "CACHE_PROMPT", "embedding": "EMBEDDINGS", "rerank": "RERANKING", "pooling": "POOLING",
    "n_predict": "N_PREDICT", "context_shift": "CONTEXT_SHIFT", "chat_template": "CHAT_TEMPLATE",
    "chat_template_file": "CHAT_TEMPLATE_FILE", "chat_template_kwargs": "CHAT_TEMPLATE_KWARGS", "jinja": "JINJA",
    "reasoning_format": "THINK", "reasoning": "REASONING", "reasoning_effort": "REASONING_EFFORT",
    "reasoning_budget": "THINK_BUDGET", "reasoning_budget_message": "THINK_BUDGET_MESSAGE",
    "prefill_assistant": "PREFILL_ASSISTANT", "temp": "TEMPERATURE", "top_k": "TOP_K",
    "top_p": "TOP_P", "min_p": "MIN_P", "repeat_penalty": "REPEAT_PENALTY", "presence_penalty": "PRESENCE_PENALTY",
    "frequency_penalty": "FREQUENCY_PENALTY", "rope_scaling": "ROPE_SCALING_TYPE", "rope_scale": "ROPE_SCALE",
    "rope_freq_base": "ROPE_FREQ_BASE", "rope_freq_scale": "ROPE_FREQ_SCALE", "yarn_orig_ctx": "YARN_ORIG_CTX",
    "yarn_ext_factor": "YARN_EXT_FACTOR", "yarn_attn_factor": "YARN_ATTN_FACTOR", "yarn_beta_slow": "YARN_BETA_SLOW",
    "yarn_beta_fast": "YARN_BETA_FAST"}


class _Command(Command):
    """Options may come from the environment."""

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(*args, **kw)
        for param in self.params:
            if param.name in ENVIRONMENT:
                param.envvar = f"LLAMA_ARG_{ENVIRONMENT[param.name]}"
            elif param.name == "api_key":
                param.envvar = "LLAMA_API_KEY"
            if param.name == "spec_type" and isinstance(param.type, click.Choice):
                param.type = Types(param.type)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """LLAMA_ARG_NO_... with any value turns off what can be turned off."""
        off = {p.name: False for p in self.params if p.name in ENVIRONMENT and p.secondary_opts
               and f"LLAMA_ARG_NO_{ENVIRONMENT[p.name]}" in os.environ}
        return super().make_context(*args, **{"default_map": off, **extra})


@click.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@options(SERVER, MODEL, CHAT, CONTEXT, SPECULATIVE, DRAFT, SAMPLING, ROPE, OUTPUT)
@click.version_option(ggraph.__version__)
@click.pass_context
def main(ctx: click.Context, /, **p: Any) -> None:
    """Serve a model over HTTP: llama-server's API, OpenAI's and Anthropic's.

    Ctrl-C or SIGTERM lets running requests end for a few seconds; a second one leaves at once. Most options may also come
    from environment variables, under llama-server's names: LLAMA_ARG_MODEL, LLAMA_ARG_CTX_SIZE, LLAMA_API_KEY and so on.
    """
    env.set_quiet(p["quiet"])
    if p["verbose"]:
        p["log_requests"] = True
        env.set_debug(1)
    try:
        import fastapi
        import prometheus_client
        import uvicorn
    except ImportError as e:
        raise ggraph.Error(f"the server needs {e.name}: pip install 'ggraph-runtime[server]'") from None
    del fastapi, prometheus_client, uvicorn
    _check(p)
    check_address(p["host"], p["port"])
    _check_certificate(p["ssl_cert_file"], p["ssl_key_file"])
    Server(p).run()


def check_address(host: str, port: int) -> None:
    """`Error` where nobody can listen at this address, before a model is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise ggraph.Error(f"there is no address {host!r} ({e.strerror}); give another --host") from None
    failed: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                if os.name == "posix":          # as asyncio does: an address that somebody listened at a moment ago is free
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(address)
        except OSError as e:
            failed.append(e)
    if len(failed) == len(found) or any(e.errno == errno.EADDRINUSE for e in failed):
        raise ggraph.Error(f"cannot listen at {host}:{port}: {failed[-1].strerror}; give another --host or --port")


def _check_certificate(certificate: str | None, key: str | None) -> None:
    if certificate and key:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
        except ssl.SSLError as e:
            raise ggraph.Error(f"{certificate} and {key} are no certificate and its key in PEM form "
                               f"({e.reason or e})") from None


def _check(p: Params) -> None:
    if bool(p["ssl_key_file"]) != bool(p["ssl_cert_file"]):
        raise click.UsageError("--ssl-key-file and --ssl-cert-file go together")
    if p["chat_template"] and p["chat_template_file"]:
        raise click.UsageError("give only one of --chat-template and --chat-template-file")
    try:
        p["chat_template_kwargs"] = json.loads(p["chat_template_kwargs"] or "{}")
    except ValueError as e:
        raise click.BadParameter(f"not JSON: {e}", param_hint="--chat-template-kwargs") from None
    if not isinstance(p["chat_template_kwargs"], dict):
        raise click.BadParameter("must be a JSON object", param_hint="--chat-template-kwargs")
    p["chat_template_kwargs"] = _thinking(p) | p["chat_template_kwargs"]
    if "draft-simple" in types(p) and not p["spec_draft_model"]:
        raise click.UsageError("--spec-type draft-simple needs a draft model: give -md")
    if p["rerank"]:
        p["embedding"], p["pooling"] = True, "rank"
    if p["n_parallel"] < 1:
        p["n_parallel"] = 1 if p["embedding"] else 4
    p["n_batch"] = max(p["n_batch"], p["n_parallel"])


def _thinking(p: Params) -> Params:
    """What --reasoning and --reasoning-effort tell the template."""
    told: Params = {} if p["reasoning"] == "auto" else {"enable_thinking": p["reasoning"] == "on"}
    if p["reasoning_effort"] is not None:
        told["reasoning_effort"] = p["reasoning_effort"]
        if p["reasoning_effort"] == "none":
            told["enable_thinking"] = False
    return told


class Server:
    """The web server on the main thread, the model loaded beside it, so that /health answers from the start."""

    def __init__(self, p: Params):
        from .app import make_app
        from .service import Service
        self.p, self.options = p, _options(p)
        self.service: Service | None = None
        self.error: BaseException | None = None
        self._web = _web(make_app(lambda: self.service, self.options), p, self._end)
        self._stop: list[Any] = []

    def run(self) -> None:
        loading = threading.Thread(target=self._load, name="ggraph-load", daemon=True)
        loading.start()
        self._web.run()
        loading.join()
        for close in reversed(self._stop):
            close()
        if self.error is not None:
            raise self.error
        if not self._web.started:
            sys.exit(1)

    def _end(self) -> None:
        """Requests that have not ended in time are told so."""
        if self.service is not None:
            self.service.close()

    def _load(self) -> None:
        try:
            self.service = self._loaded()
        except BaseException as e:
            self.error = e
            self._web.should_exit = True

    def _loaded(self) -> Any:
        from .service import Service
        p = self.p
        with Bars(p["quiet"]) as bars:
            path = hub.resolve(p["model"], lambda done, total: bars("fetch", done, total))
            model = ggraph.Model(path, **model_arguments(p))
            self._stop.append(model.close)
            arguments = context_arguments(p) | {"n_seq_max": p["n_parallel"], "n_rollback": n_rollback(p)}
            self.options.context = dict(arguments)
            if p["embedding"]:
                arguments |= {"embeddings": True, "pooling": p["pooling"], "n_ubatch": p["n_batch"]}
            ctx = ggraph.Context(model, progress=bars, **arguments)
            self._stop.append(ctx.close)
            guesses = None if p["embedding"] else guesser(p, ctx, bars, self._stop)
        show_sizes(ctx)
        template = _template(p, model)
        defaults = ggraph.sampling_defaults(model) | self.options.sampling
        self.options.sampling = defaults
        cache = p["cache_ram"] << 20 if p["cache_ram"] >= 0 else sys.maxsize
        engine = None if p["embedding"] else ggraph.Engine(
            ctx, model.vocab, context_shift=p["context_shift"], cache_bytes=cache, cache_reuse=p["cache_reuse"],
            n_checkpoints=p["n_checkpoints"], checkpoint_step=p["checkpoint_step"], guesser=guesses, n_draft=most(p))
        embedder = ggraph.Embedder(ctx) if p["embedding"] else None
        self._stop.append((engine or embedder).close)  # type: ignore[union-attr]
        env.log(f"{ctx.n_seq_max} slots of {ctx.cparams.n_ctx_seq} tokens" + (", from one pool" if ctx.cparams.kv_unified else ""))
        return Service(model, ctx, engine, embedder, template, self.options)


def _web(app: Any, p: Params, end: Callable[[], None]) -> Any:
    import uvicorn

    from .patience import patient

    class Web(uvicorn.Server):
        """One line when it listens; the first signal ends in good order, the second at once."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                os._exit(128 + sig)
            env.log(f"stopping: requests have {GRACE} seconds to end; once more to leave at once")
            self.should_exit = True
            timer = threading.Timer(GRACE, end)
            timer.daemon = True
            timer.start()

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for one in server.sockets:
                    host, port = one.getsockname()[:2]
                    host = f"[{host}]" if ":" in host else host
                    scheme, prefix = "https" if p["ssl_key_file"] else "http", p["api_prefix"]
                    env.log(f"listening at {scheme}://{host}:{port}{prefix and prefix + '/'}")

    config = uvicorn.Config(app, host=p["host"], port=p["port"], log_level="warning", access_log=False, lifespan="off",
                            timeout_graceful_shutdown=2 * GRACE, server_header=False, http=patient(p["timeout"]),
                            ssl_keyfile=p["ssl_key_file"], ssl_certfile=p["ssl_cert_file"],
                            h11_max_incomplete_event_size=1 << 16)
    return Web(config)


def _options(p: Params) -> Any:
    from .service import Options
    keys = [key for given in p["api_key"] for key in given.split(",")]
    if p["api_key_file"]:
        keys += read_text(p["api_key_file"]).splitlines()
    sampling = {k: v for k, v in sampling_arguments(p, True).items() if v is not None}
    sampling["breakers"] = tuple(sampling.pop("dry_breakers", ()))
    return Options(alias=p["alias"] or "", api_keys=tuple(k.strip() for k in keys if k.strip()), cors_origins=p["cors_origins"],
                   prefix=p["api_prefix"],
                   timeout=p["timeout"], ping=p["sse_ping_interval"], slots=p["slots"], metrics=p["metrics"], props=p["props"],
                   slot_save_path=p["slot_save_path"], cache_prompt=p["cache_prompt"], n_predict=p["n_predict"],
                   stop=tuple(p["reverse_prompt"]), prefill_assistant=p["prefill_assistant"],
                   reasoning_format=p["reasoning_format"], embd_normalize=p["embd_normalize"], log_requests=p["log_requests"],
                   reasoning_budget=p["reasoning_budget"], reasoning_budget_message=p["reasoning_budget_message"],
                   spec_types=types(p), ui=p["ui"], inspect=p["inspect"],
                   template_kwargs=p["chat_template_kwargs"], sampling=sampling)


def _template(p: Params, model: ggraph.Model) -> ggraph.ChatTemplate | None:
    source = read_text(p["chat_template_file"]) if p["chat_template_file"] else p["chat_template"]
    if not source:
        return model.chat_template
    vocab = model.vocab
    bos, eos = ("" if i is None else vocab.text(i) for i in (vocab.bos, vocab.eos))
    return ggraph.ChatTemplate(source, bos_token=bos, eos_token=eos)
