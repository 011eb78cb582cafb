"""Run vLLM's OpenAI server in processes of its own, and talk to it; every wait has an end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from engines import SETTINGS

LIMIT = 300.0  # seconds a server may take to start


class Server:
    """A running server: its process, its address and its log."""

    def __init__(self, process: subprocess.Popen[bytes], base: str, log: Path) -> None:
        self.process, self.log = process, log
        self.http = httpx.Client(base_url=base, timeout=120)

    def children(self, name: str) -> list[psutil.Process]:
        """Processes under the server with ``name`` in their name."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if name in child.name()]

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a body about the model; whatever the status."""
        return self.http.post(path, json={"model": "tiny"} | body)

    def tokens(self, prompt: list[int], **body: Any) -> list[int]:
        """The token ids of one completion."""
        body = {"temperature": 0, "return_token_ids": True, "ignore_eos": True, "prompt": prompt} | body
        reply = self.post("/v1/completions", **body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]


@contextlib.contextmanager
def server(
    pair: tuple[str, str],
    speculative: dict[str, Any] | None,
    log: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    **changes: Any,
) -> Iterator[Server]:
    """A server on ``pair``'s target, ready; gone afterwards, with all its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", pair[0], *flags]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    for key, value in (SETTINGS | changes).items():
        if not isinstance(value, bool):
            command += ["--" + key.replace("_", "-"), str(value)]
    if speculative is not None:
        command += ["--speculative-config", json.dumps({"model": pair[1]} | speculative)]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
    found = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait(found)
        yield found
    finally:
        found.http.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _wait(found: Server) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and found.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if found.http.get("/health", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"no server: {found.log.read_text()[-3000:]}")
