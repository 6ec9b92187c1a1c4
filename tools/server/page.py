"""The page at /: the files of the folder `page`, with headers that let them load from here alone.

In: GET requests. Out: static files, also while the model loads and without an API key, which the page asks for itself. Must not
know: what the page does.
"""
from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
          "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'")
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-cache"}


def add_page(app: FastAPI) -> None:
    """The files are read now: a request names one of them, never a path."""
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            _add(app, "/" if path.name == "index.html" else PREFIX + path.name, path.read_bytes(), TYPES[path.suffix])


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)
    app.add_route(path, send, methods=["GET"], include_in_schema=False)
