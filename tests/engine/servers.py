"""Run vLLM's OpenAI server in processes of its own, and talk to it; every wait has an end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from engines import SETTINGS, prompts

LIMIT = 300.0  # seconds a server may take to start
LONG = 200  # tokens known of an answer that a fault cuts off
# Tokens asked for: a busy machine may be seconds late with one stream while another goes on.
ENDLESS = 1900
KNOWING = Path(__file__).with_name("oracle_server.py")


class Answer(NamedTuple):
    """What a chat's client sees; a stream's parts put together."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]  # names and arguments
    reason: str
    tokens: list[int]


class Server:
    """A running server: its process, its address, its log, and the file of what its drafter knows."""

    def __init__(self, process: subprocess.Popen[bytes], base: str, log: Path, texts: Path) -> None:
        self.process, self.log, self.texts = process, log, texts
        # Server and client both drop an idle connection after 5 s: reused just then, it fails.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=base, timeout=120, limits=fresh)

    def children(self, name: str) -> list[psutil.Process]:
        """Processes under the server with ``name`` in their name."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if name in child.name()]

    def kill(self, name: str) -> None:
        """SIGKILL for the one process under the server with ``name`` in its name."""
        (victim,) = self.children(name)
        victim.send_signal(signal.SIGKILL)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a body about the model; whatever the status."""
        return self.http.post(path, json={"model": "tiny"} | body)

    def tokens(self, prompt: list[int], **body: Any) -> list[int]:
        """The token ids of one completion."""
        body = {"temperature": 0, "return_token_ids": True, "ignore_eos": True, "prompt": prompt} | body
        reply = self.post("/v1/completions", **body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    def chat(self, **body: Any) -> tuple[list[int], Answer]:
        """The prompt's token ids and the answer of one chat."""
        reply = self.post("/v1/chat/completions", return_token_ids=True, **body)
        assert reply.status_code == 200, reply.text
        data = reply.json()
        choice = data["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        called = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(call["name"], call["arguments"]) for call in called]
        thought, content = message.get("reasoning") or "", message["content"] or ""
        return data["prompt_token_ids"], Answer(thought, content, calls, reason, choice["token_ids"])

    def stream(self, **body: Any) -> Answer:
        """The answer of one chat that is streamed."""
        body = {"model": "tiny", "stream": True, "return_token_ids": True} | body
        thought, content, reason = "", "", ""
        calls: dict[int, tuple[str, str]] = {}
        tokens: list[int] = []
        with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            parts = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        for choice in (choice for part in parts for choice in part["choices"]):
            delta, reason = choice["delta"], choice.get("finish_reason") or reason
            thought += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            tokens += choice.get("token_ids") or ()
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                more = call["function"]
                name, arguments = name + (more.get("name") or ""), arguments + (more.get("arguments") or "")
                calls[call["index"]] = (name, arguments)
        return Answer(thought, content, [calls[index] for index in sorted(calls)], reason, tokens)

    @contextlib.contextmanager
    def knowing(self, texts: list[list[int]]) -> Iterator[None]:
        """Within, the drafter of a server with ``known=True`` knows these prompts with their answers."""
        whole = self.texts.with_suffix(".new")
        whole.write_text(json.dumps(texts))
        whole.rename(self.texts)  # the drafter may read at any time
        try:
            yield
        finally:
            self.texts.unlink()

    def drafts(self) -> tuple[float, float, float]:
        """Drafts so far, tokens in them, tokens accepted."""
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        page = self.http.get("/metrics").text
        found = [re.search(rf"^vllm:spec_decode_{name}_total\S* (\S+)$", page, re.M) for name in names]
        drafts, tokens, accepted = (float(match[1]) for match in found if match)
        return drafts, tokens, accepted


@contextlib.contextmanager
def server(
    pair: tuple[str, str],
    speculative: dict[str, Any] | None,
    log: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    known: bool = False,
    **changes: Any,
) -> Iterator[Server]:
    """A server on ``pair``'s target, ready; gone afterwards, with all its processes.

    ``known``: its drafter can be told the answers (oracle_server.py).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    entry = [str(KNOWING)] if known else ["-m", "vllm.entrypoints.openai.api_server"]
    command = [sys.executable, *entry, "--model", pair[0], *flags]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    for key, value in (SETTINGS | changes).items():
        if not isinstance(value, bool):
            command += ["--" + key.replace("_", "-"), str(value)]
    if speculative is not None:
        command += ["--speculative-config", json.dumps({"model": pair[1]} | speculative)]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
    texts = log.with_suffix(".texts")
    if known:
        env["DDTREE_TEXTS"] = str(texts)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
    found = Server(process, f"http://127.0.0.1:{port}", log, texts)
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


# A plugin that breaks the walk of the next step once a file is there.
FAULT = """
import pathlib
import torch

TRIGGER = pathlib.Path(__file__).with_name("trigger")


def register():
    from vllm_ddtree.engine.scorer import TreeScorer

    honest = TreeScorer.__call__

    def call(self, logits, *args, **kwargs):
        if TRIGGER.exists():
            if not logits.is_cuda:
                raise RuntimeError("put here by a test")
            logits[torch.tensor([len(logits)], device=logits.device)]
        return honest(self, logits, *args, **kwargs)

    TreeScorer.__call__ = call
"""


def make_fault(folder: Path) -> Path:
    """Write a vLLM plugin that a server finds with ``folder`` on PYTHONPATH; its trigger, to be touched."""
    (folder / "ddtree_fault.py").write_text(FAULT)
    info = folder / "ddtree_fault-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-fault\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nddtree_fault = ddtree_fault:register\n")
    return folder / "trigger"


def check_end(running: Server, fault: Callable[[], Any], expected: list[list[int]]) -> None:
    """A fault under two streaming clients and one waiting: each is told, nobody waits, nothing is left.

    ``expected``: the answers to ``prompts(3, seed=5)``, their first LONG tokens; each client has a beginning.
    """
    asked = prompts(3, seed=5)
    under_way = [threading.Event(), threading.Event()]
    body = {
        "model": "tiny",
        "max_tokens": ENDLESS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def stream(prompt: list[int], begun: threading.Event) -> tuple[list[int], Any]:
        tokens: list[int] = []
        error = None
        with running.http.stream(
            "POST", "/v1/completions", json=body | {"prompt": prompt, "stream": True}
        ) as r:
            for line in r.iter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line[6:])
                error = data.get("error", error)
                tokens += [t for choice in data.get("choices", ()) for t in choice.get("token_ids") or ()]
                if tokens:
                    begun.set()
        return tokens, error

    processes = psutil.Process(running.process.pid).children(recursive=True)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, *each) for each in zip(asked, under_way, strict=False)]
        whole = pool.submit(running.http.post, "/v1/completions", json=body | {"prompt": asked[2]})
        assert all(begun.wait(60) for begun in under_way)
        fault()
        for future, text in zip(streams, expected, strict=False):
            tokens, error = future.result(30)
            assert 0 < len(tokens) < ENDLESS
            assert tokens[:LONG] == text[: len(tokens)]
            assert error["code"] == 500
        assert whole.result(30).status_code == 500
    running.process.wait(30)
    with pytest.raises(httpx.TransportError):
        running.http.get("/health", timeout=10)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
