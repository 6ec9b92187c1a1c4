"""The command line of ggraph-server: flags, environment variables, what is wrong with them."""
from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from ggraph.tools.server import command

pytest.importorskip("fastapi")


def parsed(monkeypatch: pytest.MonkeyPatch, *args: str, **environ: str) -> dict[str, Any]:
    """What the server would be started with."""
    seen: dict[str, Any] = {}

    class Stub:
        def __init__(self, p: dict[str, Any]):
            seen.update(p, options=command._options(p))

        def run(self) -> None:
            pass
    monkeypatch.setattr(command, "Server", Stub)
    result = CliRunner().invoke(command.main, args, env=environ)
    assert result.exit_code == 0, result.output
    return seen


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parsed(monkeypatch, "-c", "1024", "-np", "2", "--seed", "42", "--temp", "0.5", "--api-key", "a,b", "-a", "x", "-b", "1")
    assert (p["n_ctx"], p["n_parallel"], p["n_batch"]) == (1024, 2, 2)
    options = p["options"]
    assert options.api_keys == ("a", "b") and options.alias == "x" and options.sampling["seed"] == 42
    assert options.sampling["temp"] == 0.5


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_ENDPOINT_SLOTS": "false",
               "LLAMA_API_KEY": "k", "LLAMA_ARG_PORT": "9000", "LLAMA_ARG_UI": "0"}
    p = parsed(monkeypatch, "--port", "9001", **environ)
    assert (p["n_ctx"], p["metrics"], p["slots"], p["port"], p["n_parallel"]) == (512, True, False, 9001, 4)
    assert p["options"].api_keys == ("k",) and not p["options"].ui and not p["options"].inspect


def test_what_the_environment_turns_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"LLAMA_ARG_NO_UI": "1", "LLAMA_ARG_NO_CACHE_PROMPT": "", "LLAMA_ARG_NO_KV_UNIFIED": "0", "LLAMA_ARG_NO_PORT": "1"}
    p = parsed(monkeypatch, **off)
    assert not (p["ui"] or p["cache_prompt"] or p["kv_unified"]) and p["slots"] and p["port"] == 8080
    assert parsed(monkeypatch, "--ui", **off)["ui"]


def test_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parsed(monkeypatch, "--reasoning", "off", LLAMA_ARG_THINK_BUDGET="7", LLAMA_ARG_THINK_BUDGET_MESSAGE="stop")
    assert p["options"].template_kwargs == {"enable_thinking": False}
    assert (p["options"].reasoning_budget, p["options"].reasoning_budget_message) == (7, "stop")
    p = parsed(monkeypatch, "--reasoning-effort", "none", "--chat-template-kwargs", '{"enable_thinking": true}')
    assert p["options"].template_kwargs == {"enable_thinking": True, "reasoning_effort": "none"}


def test_every_variable_is_of_an_option() -> None:
    assert command.ENVIRONMENT.keys() <= {param.name for param in command.main.params}


@pytest.mark.parametrize("args, said", [
    (["--port", "99999"], "--port"),
    (["--chat-template-kwargs", "[1]"], "JSON object"),
    (["--chat-template", "x", "--chat-template-file", __file__], "only one of"),
    (["--slot-save-path", "/nonexistent"], "--slot-save-path"),
    (["-np", "many"], "--parallel"),
])
def test_what_is_wrong(args: list[str], said: str) -> None:
    result = CliRunner().invoke(command.main, args)
    assert result.exit_code == 2 and said in result.output
