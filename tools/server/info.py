"""Routes about the server itself: models, properties, slots and their files, LoRA adapters, metrics.

In: a `Service`. Out: plain JSON, and Prometheus text.
"""
from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

import ggraph

from .problem import JSON, Problem
from .sampling import Settings
from .schema import Sampling, SlotFile
from .service import Service

BUILD = f"ggraph-{ggraph.__version__}"
VOCAB_TYPES = {"none": 0, "spm": 1, "bpe": 2, "wpm": 3, "ugm": 4, "rwkv": 5}
FTYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K - Small",
          12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium", 16: "Q5_K - Small",
          17: "Q5_K - Medium", 18: "Q6_K", 32: "BF16"}


def ftype(service: Service) -> str:
    n = service.model.kv.get("general.file_type")
    return FTYPES.get(n, f"type {n}") if isinstance(n, int) else "unknown"


def models(service: Service) -> Response:
    model, name = service.model, service.name
    meta = {"vocab_type": VOCAB_TYPES.get(service.vocab.kind, 0), "n_vocab": model.n_vocab, "n_ctx": service.n_ctx_slot,
            "n_ctx_train": model.hparams.n_ctx_train, "n_embd": model.hparams.n_embd, "n_params": model.n_params,
            "size": model.file.size, "ftype": ftype(service)}
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "", "quantization_level": ""}
    listed = {"name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model", "description": "",
              "tags": [""], "capabilities": ["completion"], "parameters": "", "details": details}
    entry = {"id": name, "aliases": [name], "tags": [], "object": "model", "created": int(service.started),
             "owned_by": "llamacpp", "meta": meta}
    return JSON({"models": [listed], "object": "list", "data": [entry]})


def props(service: Service) -> Response:
    options, vocab, template = service.options, service.vocab, service.template
    params = defaults(service).described(list(options.stop), 0)
    source = template.source if template else ""
    caps = {"supports_object_arguments": False, "supports_parallel_tool_calls": False, "supports_preserve_reasoning": False,
            "supports_reasoning_effort": "reasoning_effort" in source, "supports_string_content": True,
            "supports_system_role": "system" in source, "supports_tool_calls": "tool_calls" in source,
            "supports_tools": "tools" in source, "supports_typed_content": False}
    return JSON({
        "default_generation_settings": {"params": params, "n_ctx": service.n_ctx_slot}, "total_slots": service.n_slots,
        "model_alias": service.name, "model_ftype": ftype(service), "model_path": str(service.model.path),
        "modalities": {"vision": False, "video": False, "audio": False}, "media_marker": "<__media__>",
        "endpoint_slots": options.slots, "endpoint_props": options.props, "endpoint_metrics": options.metrics, "ui": options.ui,
        "ui_settings": {}, "chat_template": source, "chat_template_caps": caps,
        "bos_token": "" if vocab.bos is None else vocab.text(vocab.bos),
        "eos_token": "" if vocab.eos is None else vocab.text(vocab.eos), "build_info": BUILD, "is_sleeping": False,
        "cors_proxy_enabled": False})


def defaults(service: Service) -> Settings:
    return service.settings(Sampling())


# --- slots


def slots(service: Service, fail_on_no_slot: bool) -> Response:
    if not service.options.slots:
        raise Problem(501, "This server does not support slots endpoint. Start it with `--slots`")
    found = service.engine.slots
    if fail_on_no_slot and all(s.task for s in found):
        raise Problem(503, "no slot available")
    return JSON([_slot(service, s) for s in found])


def _slot(service: Service, slot: Any) -> dict[str, Any]:
    task = slot.task
    shown = {"id": slot.id, "n_ctx": service.n_ctx_slot, "speculative": bool(service.options.spec_types),
             "is_processing": task is not None, "n_past": len(slot.tokens), "cache_reuse": slot.reuse}
    if task is None:
        return shown
    n = len(task.output.tokens)
    left = task.request.max_tokens - n if task.request.max_tokens >= 0 else -1
    token = {"has_next_token": task.output.finish_reason is None, "has_new_line": "\n" in task.output.text, "n_remain": left,
             "n_decoded": n}
    return {**shown, "id_task": task.number, "n_prompt_tokens": task.n_prompt, "n_prompt_tokens_processed": task.n_evaluated,
            "n_prompt_tokens_cache": max(task.n_cached, 0), "params": {"n_predict": task.request.max_tokens},
            "next_token": [token]}


async def slot_action(service: Service, id: str, action: str | None, body: SlotFile) -> Response:
    folder = service.options.slot_save_path
    if folder is None:
        raise Problem(501, "This server does not support slots action. Start it with `--slot-save-path`")
    if not id.isascii() or not id.isdecimal() or len(id) > 9:
        raise Problem(400, "Invalid slot ID")
    if int(id) >= service.n_slots:
        raise Problem(404, f"there is no slot {id}; this server has 0 to {service.n_slots - 1}")
    slot = service.engine.slots[int(id)]
    if action == "erase":
        n = await _between_rounds(service, lambda: _erase(slot))
        return JSON({"id_slot": slot.id, "n_erased": n})
    if action not in ("save", "restore"):
        raise Problem(400, "Invalid action: use save, restore or erase")
    path = Path(folder) / safe_name(body.filename)
    start = time.perf_counter()
    work = slot.save if action == "save" else slot.restore
    try:
        n = await _between_rounds(service, lambda: work(path))
    except (ggraph.Error, OSError) as e:
        raise Problem(400, f"Unable to {action} slot: {reason(e)}") from None
    ms, size = 1e3 * (time.perf_counter() - start), path.stat().st_size
    names = ("n_saved", "n_written", "save_ms") if action == "save" else ("n_restored", "n_read", "restore_ms")
    return JSON({"id_slot": slot.id, "filename": body.filename, names[0]: n, names[1]: size, "timings": {names[2]: ms}})


def reason(error: Exception) -> str:
    """Without the paths of this machine."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


async def _between_rounds(service: Service, function: Any) -> Any:
    return await asyncio.wrap_future(service.engine.call(function))


def safe_name(name: str | None) -> str:
    """A plain file name: no folders, no hidden files, nothing that a system gives a meaning."""
    plain = name and re.fullmatch(r"\w[\w .+=@-]*", name) and not name.endswith((" ", "."))
    if not name or not plain or len(name.encode(errors="replace")) > 200:
        raise Problem(400, "Invalid filename")
    return name


def _erase(slot: Any) -> int:
    if slot.task is not None:
        raise Problem(400, f"slot {slot.id} is in use; wait for the end of its request")
    n = len(slot.tokens)
    slot.history.clear()
    return n


# --- LoRA adapters


def adapters(service: Service) -> Response:
    """In the order of the command line; ids count from 0."""
    return JSON([{"id": i, "path": str(a.path), "scale": scale, "task_name": "", "prompt_prefix": ""}
                 for i, (a, scale) in enumerate(service.adapters())])


async def set_adapters(service: Service, scales: Any) -> Response:
    """[{"id", "scale"}, ...]; those not listed are off."""
    wanted = service.chosen(scales if isinstance(scales, list) else [None])
    if service.adapters():
        await asyncio.wrap_future(service.engine.set_adapters(wanted))
    return JSON({"success": True})


# --- metrics


class _Metrics(Collector):
    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Any]:
        engine = self._service.engine
        s = engine.stats
        for name, text, value in (
                ("prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens", s.prompt_n),
                ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache", s.cached_n),
                ("prompt_seconds_total", "Total time spent processing prompts", s.prompt_ms / 1e3),
                ("tokens_predicted_total", "Number of generation tokens processed", s.generated_n),
                ("tokens_predicted_seconds_total", "Total time spent generating tokens", s.generated_ms / 1e3),
                ("n_decode_total", "Total number of rounds that computed", s.n_decode),
                ("preemptions_total", "Requests that had to wait for cells and were run again", s.n_preempted),
                ("spec_decode_num_draft_tokens_total", "Speculative: Total draft tokens generated", s.draft_n),
                ("spec_decode_num_accepted_tokens_total", "Speculative: Total draft tokens accepted by the target model",
                 sum(s.accepted)),
                ("spec_decode_num_drafts_total", "Speculative: Total speculative decoding verification steps", s.n_drafts)):
            yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
        places = CounterMetricFamily("llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
                                     "Speculative: accepted draft tokens by their position in the draft", labels=["position"])
        for place, n in enumerate(s.accepted):
            places.add_metric([str(place)], n)
        yield places
        busy = sum(slot.task is not None for slot in engine.slots)
        for name, text, value in (
                ("n_tokens_max", "Largest observed sequence length (prompt + generation)", s.n_tokens_max),
                ("prompt_tokens_seconds", "Average prompt throughput in tokens/s", _per_second(s.prompt_n, s.prompt_ms)),
                ("predicted_tokens_seconds", "Average generation throughput in tokens/s",
                 _per_second(s.generated_n, s.generated_ms)),
                ("requests_processing", "Number of requests processing", busy),
                ("requests_deferred", "Number of requests deferred", engine.n_waiting),
                ("n_busy_slots_per_decode", "Average number of busy slots per round", s.n_busy / s.n_decode if s.n_decode else 0)):
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)


def _per_second(n: int, ms: float) -> float:
    return 1e3 * n / ms if ms else 0.0


def metrics(service: Service) -> Response:
    if not service.options.metrics:
        raise Problem(501, "This server does not support metrics endpoint. Start it with `--metrics`")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(service))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4",
                    headers={"Process-Start-Time-Unix": str(int(service.started))})
