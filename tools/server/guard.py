"""What every request passes first: the API key, CORS, the name in the header, the log.

An ASGI middleware. In: requests. Out: the same, or 401 and answers to preflights. Must not know: routes but the public ones.
"""
from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggraph import env

from .problem import Problem, answer

PUBLIC = ("/", "/health", "/v1/health")
PUBLIC_FOLDER = "/page/"         # what the page is made of
LOCAL = ("localhost", "127.0.0.1", "::1")


class Prefix:
    """All routes below `prefix`, which begins with a slash and ends with none; anything else is a 404."""

    def __init__(self, app: ASGIApp, prefix: str):
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(self.prefix)
            if path == scope["path"] or not path.startswith("/"):
                await answer(Problem(404, "File Not Found"))(scope, receive, send)
                return
            scope = {**scope, "path": path}
        await self.app(scope, receive, send)


class Guard:
    """`keys`: none means that all may come. `origins`: "*", "localhost", or a comma list of origins. `log`: a line for each
    request, without anything of its body."""

    def __init__(self, app: ASGIApp, keys: Iterable[str] = (), origins: str = "localhost", log: bool = False):
        self.app, self.keys, self.origins, self.log = app, [k.encode() for k in keys], origins, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        extra = {"Server": "llama.cpp", **self._cors(headers.get("origin"))}

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(extra)
                if self.log:
                    env.log(f"{scope['method']} {scope['path'].encode('unicode_escape').decode()} {message['status']}")
            await send(message)
        if scope["method"] == "OPTIONS":
            allowed = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Allow-Headers": "*"}
            if asked := headers.get("access-control-request-headers"):
                allowed["Access-Control-Allow-Headers"] = asked
            await Response(media_type="text/html", headers=allowed)(scope, receive, told)
        elif self._admits(scope["path"], headers):
            await self.app(scope, receive, told)
        else:
            await answer(Problem(401, "Invalid API Key"))(scope, receive, told)

    def _admits(self, path: str, headers: Headers) -> bool:
        if not self.keys or path in PUBLIC or path.startswith(PUBLIC_FOLDER):
            return True
        given = re.sub("^bearer ", "", headers.get("authorization", ""), flags=re.IGNORECASE).strip()
        given = given or headers.get("x-api-key", "")
        return any(hmac.compare_digest(given.encode(), key) for key in self.keys)

    def _cors(self, origin: str | None) -> dict[str, str]:
        if self.origins == "*":         # for all, therefore without credentials
            return {"Access-Control-Allow-Origin": "*"}
        if not origin or not self._trusts(origin):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true", "Vary": "Origin"}

    def _trusts(self, origin: str) -> bool:
        if self.origins == "localhost":
            try:
                return urlsplit(origin).hostname in LOCAL
            except ValueError:
                return False
        return origin in self.origins.split(",")
