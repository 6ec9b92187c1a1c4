"""The routes: which path takes which body and is answered by which function.

In: a function that gives the loaded `Service`, or None while it loads. Out: an ASGI application.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from . import anthropic, info, inside, native, openai, responses, utilities
from .body import check, read, read_any
from .chat import checked_messages, checked_tools, converse, render
from .guard import Guard, Prefix
from .page import add_page
from .problem import JSON, Problem, answer
from .schema import (
    Body,
    Chat,
    Completion,
    Control,
    Detokenize,
    Embeddings,
    Infill,
    Inspect,
    Messages,
    Rerank,
    Responses,
    SlotFile,
    Tokenize,
    request_body,
)
from .service import Options, Service, in_thread
from .stream import ClientLeft

Get = Callable[[], Service | None]
Handler = Callable[[Service, Request, Any], Awaitable[Response]]


def make_app(get: Get, options: Options) -> Guard | Prefix:
    app = FastAPI(title="ggraph-server", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _error)
    routes = Routes(app, get, options)
    _text_routes(routes)
    _chat_routes(routes)
    _server_routes(routes, options)
    if options.ui:
        add_page(app)
    guard = Guard(app, options.api_keys, options.cors_origins, options.log_requests)
    return Prefix(guard, options.prefix) if options.prefix else guard


async def _http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        return answer(Problem(405, "Method Not Allowed"))
    return answer(Problem(404, "File Not Found"))


async def _error(request: Request, error: Exception) -> Response:
    return answer(error)


class Routes:
    """Adds routes whose bodies are read and checked, and whose errors are answers."""

    def __init__(self, app: FastAPI, get: Get, options: Options):
        self._app, self._get, self._options = app, get, options
        self._more: dict[str, dict[str, Any]] = {}

    def describe(self, path: str, **more: Any) -> None:
        """What the OpenAPI description says of a path beside its body."""
        self._more[path] = more

    def loaded(self) -> Service:
        service = self._get()
        if service is None:
            raise Problem(503, "Loading model")
        return service

    def post(self, paths: str, model: type[BaseModel], handler: Handler) -> None:
        async def run(request: Request) -> Response:
            try:
                value = await read(request, self._options.timeout)
                return await handler(self.loaded(), request, check(model, value))
            except ClientLeft:
                return Response(status_code=499)
            except Exception as e:
                return answer(e)
        self._add(paths, "POST", run, request_body(model))

    def array(self, paths: str, handler: Callable[[Service, Any], Awaitable[Response]]) -> None:
        """A route whose body is an array."""
        async def run(request: Request) -> Response:
            try:
                return await handler(self.loaded(), await read_any(request, self._options.timeout))
            except Exception as e:
                return answer(e)
        self._add(paths, "POST", run, {"requestBody": {"content": {"application/json": {"schema": {"type": "array", "items": {
            "type": "object"}}}}}})

    def get(self, paths: str, handler: Callable[[Service, Request], Response]) -> None:
        async def run(request: Request) -> Response:
            try:
                return handler(self.loaded(), request)
            except Exception as e:
                return answer(e)
        self._add(paths, "GET", run, None)

    def absent(self, paths: str, what: str) -> None:
        """Routes that clients know and this server does not have."""
        async def run(request: Request) -> Response:
            return answer(Problem(501, f"This server does not support {what}"))
        self._add(paths, "POST", run, None)

    def _add(self, paths: str, method: str, run: Callable[[Request], Awaitable[Response]], extra: dict[str, Any] | None) -> None:
        for path in paths.split():
            told = {**(extra or {}), **self._more.get(path, {})}
            name = f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}"
            self._app.add_api_route(path, run, methods=[method], openapi_extra=told, response_class=JSON, response_model=None,
                                    operation_id=name, name=name)


def _text_routes(r: Routes) -> None:
    r.post("/completion /completions", Completion, native.completion)
    r.post("/infill", Infill, native.infill)
    r.post("/v1/completions", Completion, openai.completions)
    r.post("/tokenize", Tokenize, utilities.tokenize)
    r.post("/detokenize", Detokenize, utilities.detokenize)
    r.post("/embedding /embeddings", Embeddings, lambda s, q, b: utilities.embeddings(s, q, b, False))
    r.post("/v1/embeddings", Embeddings, lambda s, q, b: utilities.embeddings(s, q, b, True))
    r.absent("/v1/audio/transcriptions /audio/transcriptions", "audio")
    r.post("/rerank /reranking /v1/rerank /v1/reranking", Rerank, utilities.rerank)


def _chat_routes(r: Routes) -> None:
    r.post("/v1/chat/completions /chat/completions", Chat, openai.chat)
    r.post("/v1/chat/completions/control", Control, openai.control)
    r.post("/apply-template", Chat, _apply_template)
    r.post("/v1/chat/completions/input_tokens /chat/completions/input_tokens", Chat, _chat_tokens)
    r.post("/v1/responses /responses", Responses, responses.create)
    r.post("/v1/responses/input_tokens /responses/input_tokens", Responses, _response_tokens)
    r.post("/v1/messages", Messages, anthropic.create)
    r.post("/v1/messages/count_tokens", Messages, anthropic.count_tokens)


async def _apply_template(service: Service, request: Request, body: Chat) -> Response:
    def work() -> str:
        return render(service, body, checked_messages(body.messages), checked_tools(body.tools))
    return JSON({"prompt": await in_thread(work)})


async def _chat_tokens(service: Service, request: Request, body: Chat) -> Response:
    conversation = await in_thread(converse, service, body)
    return JSON({"object": "response.input_tokens", "input_tokens": len(conversation.job.ids)})


async def _response_tokens(service: Service, request: Request, body: Responses) -> Response:
    return await _chat_tokens(service, request, responses.as_chat(body))


def _server_routes(r: Routes, options: Options) -> None:
    r.get("/health /v1/health", lambda s, q: JSON({"status": "ok"}))
    r.get("/models /v1/models", lambda s, q: info.models(s))
    r.get("/props", lambda s, q: info.props(s))
    r.post("/props", Body, _change_props)
    r.get("/slots", lambda s, q: info.slots(s, q.query_params.get("fail_on_no_slot") == "1"))
    r.describe("/slots/{id}", parameters=[
        {"name": "id", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}},
        {"name": "action", "in": "query", "required": True, "schema": {"enum": ["save", "restore", "erase"]}}])
    r.post("/slots/{id}", SlotFile, lambda s, q, b: info.slot_action(s, q.path_params["id"], q.query_params.get("action"), b))
    r.get("/metrics", lambda s, q: info.metrics(s))
    r.get("/lora-adapters", lambda s, q: info.adapters(s))
    r.array("/lora-adapters", info.set_adapters)
    r.get("/ggraph/inspect", lambda s, q: inside.limits(s))
    r.post("/ggraph/inspect", Inspect, inside.inspect)


async def _change_props(service: Service, request: Request, body: Body) -> Response:
    if not service.options.props:
        raise Problem(501, "This server does not support changing global properties. Start it with `--props`")
    return JSON({"success": True})
