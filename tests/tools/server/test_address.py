"""Where the server is: below a prefix, behind TLS, at an address that is free."""
from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner

from ggraph.tools.server import command
from ggraph.tools.server.service import Options
from tests.tools.server.conftest import Server, running
from tests.tools.server.test_page_files import asked


def test_an_address_at_which_nobody_can_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, said in ("127.0.0.1", f"cannot listen at 127.0.0.1:{port}"), ("192.0.2.1", "cannot listen at 192.0.2.1"), \
                ("no.such.host.invalid", "there is no address 'no.such.host.invalid'"):
            result = CliRunner().invoke(command.main, ["--host", host, "--port", str(port), "-m", "nonesuch"])
            assert result.exit_code == 1 and f"error: {said}" in result.output
    command.check_address("127.0.0.1", port)
    command.check_address("localhost", 0)


def test_everything_is_below_the_prefix(file: str) -> None:
    with running("-m", file, "-c", "256", "--api-prefix", "/a/llm", "--api-key", "k") as server:
        assert server.url.endswith("/a/llm/")
        root = server.url.removesuffix("/a/llm/")
        assert [httpx.get(root + path).status_code for path in ("/health", "/", "/a/llm", "/a/llmx/health")] == [404] * 4
        assert [httpx.get(server.url + path).status_code for path in ("health", "", "page/app.js", "props")] == [200, 200, 200, 401]
        with openai.OpenAI(base_url=server.url + "v1", api_key="k") as client:
            answer = client.completions.create(model="", prompt="the rain", max_tokens=3, temperature=0)
        assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_the_page_names_no_path_from_the_root() -> None:
    page = asked("/a/", Options(prefix="/a")).text
    assert 'src="page/app.js"' in page and '="/' not in page
    assert "fetch(path.slice(1)" in asked("/a/page/api.js", Options(prefix="/a")).text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A key, and a certificate that it signed itself."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    key, certificate = (str(tmp_path_factory.mktemp("tls") / name) for name in ("key.pem", "certificate.pem"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
                   check=True, capture_output=True)
    return key, certificate


def test_tls(file: str, pair: tuple[str, str]) -> None:
    import ssl
    server = Server("-m", file, "-c", "256", "--ssl-key-file", pair[0], "--ssl-cert-file", pair[1])
    try:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=pair[1])) as client:
            for _ in range(300):
                if client.get("/health").status_code == 200:
                    break
                time.sleep(0.05)
            answer = client.post("/completion", json={"prompt": "the rain", "n_predict": 3, "temperature": 0})
            assert answer.json()["tokens_predicted"] == 3
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_what_is_no_certificate(pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("x")
    for key, certificate in (pair[1], pair[0]), (str(tmp_path / "x.pem"), pair[1]), (pair[0], str(tmp_path / "x.pem")):
        result = CliRunner().invoke(command.main, ["--port", "0", "--ssl-key-file", key, "--ssl-cert-file", certificate])
        assert result.exit_code == 1 and "are no certificate and its key in PEM form" in result.output
    assert "go together" in CliRunner().invoke(command.main, ["--ssl-key-file", pair[0]]).output


@pytest.mark.parametrize("prefix", ["llm", "/", "/llm/", "//"])
def test_what_is_no_prefix(prefix: str) -> None:
    result = CliRunner().invoke(command.main, ["--api-prefix", prefix])
    assert result.exit_code == 2 and "must begin with a slash" in result.output
