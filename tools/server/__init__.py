"""ggraph-server: llama-server's, OpenAI's and Anthropic's APIs over HTTP, for many clients at once.

Reading order: command, service, app; schema, sampling, problem, body, guard; native, replies, calls, chat, openai, responses,
anthropic; utilities, info.
"""
from .command import main

__all__ = ["main"]
