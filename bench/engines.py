"""The engines of a run: each in a process of its own (worker.py), driven by JSON lines, all up at once.

Each mode (no speculation, chain, tree of N nodes) is one engine, so that their measurements can be
interleaved; only one of them works at any time. Every benchmark and GPU check stands on this.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().with_name("worker.py")
# Engines inherit these.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Engine:
    """The parent's side: start, wait until ready, ask, stop."""

    def __init__(self, name: str, llm_args: dict[str, Any], log: Path, code: Sequence[Path] = ()) -> None:
        """``code``: folders that go before everything else on PYTHONPATH, the package's own among them."""
        self.name = name
        self._log, self._code = log.open("w"), [path.resolve() for path in code]
        path = [*map(str, self._code), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | ({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
        )
        self._send(llm_args)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next answer; RuntimeError with the log's tail if the engine died."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        tail = Path(self._log.name).read_text()[-3000:]
        raise RuntimeError(f"engine {self.name} stopped:\n{tail}")

    def wait(self) -> None:
        """Block until the engine can be asked; RuntimeError where it runs other code than it was given."""
        package = self.receive()["package"]
        if self._code and (package is None or Path(package) not in self._code):
            self.stop()
            given = ", ".join(map(str, self._code))
            raise RuntimeError(
                f"engine {self.name} must run vllm_ddtree of {given}; found that of {package}."
            )
        self.receive()

    def ask(self, **message: Any) -> dict[str, Any]:
        """Generate once: prompts (text or token lists), temperature, max_tokens, and what to report."""
        self._send(message)
        return self.receive()

    def watch(self) -> None:
        """From here on count what a warm engine must not do."""
        self.ask(command="watch")

    def counts(self) -> dict[str, Any]:
        """What happened since :meth:`watch`: synchronisations by place, compilations, graph captures."""
        return self.ask(command="counts")

    def profile(self, path: Path) -> None:
        """Write where host and GPU spend a step at batch 1."""
        self.ask(command="profile", path=str(path))

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def all_up(
    wanted: Mapping[str, dict[str, Any]], out: Path, code: Mapping[str, Sequence[Path]] | None = None
) -> Iterator[dict[str, Engine]]:
    """Engines by name from their LLM arguments, started together and ready; ended whatever happens.

    Their logs lie beside the result ``out``; ``code``: where an engine's package is, by name.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Engine] = {}
    try:
        for name, llm_args in wanted.items():
            log = out.with_suffix(f".{name}.log")
            engines[name] = Engine(name, llm_args, log, (code or {}).get(name, ()))
        for engine in engines.values():
            engine.wait()
            print(f"{engine.name}: ready", flush=True)
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


def llm_settings(model: str, max_model_len: int, seqs: int, tokens: int, kv_gib: float) -> dict[str, Any]:
    """LLM arguments that all engines of a run share; a cache of ``kv_gib`` each, so that all find room."""
    return {
        "model": model,
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "kv_cache_memory_bytes": int(kv_gib * 2**30),
        "gpu_memory_utilization": 0.05,  # only checked against free memory
    }


def graph_sizes(seqs: int, width: int) -> list[int]:
    """Capture sizes that give the chain graphs for its whole batches, as ddtree sets them for itself."""
    whole = {n * width for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64) if n <= seqs}
    return sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, 512} | whole)


def modes(
    drafter: str,
    nodes: list[int],
    seqs: int,
    synthetic: Sequence[float] | None = None,
    derivers: Sequence[str] = ("draw",),
) -> dict[str, dict[str, Any]]:
    """LLM arguments of no speculation, the chain of 15 and trees of each deriver; 0 nodes: ddtree's default,
    which falls with the batch; ``synthetic``: imposed accepted lengths."""
    chain: dict[str, Any] = {"method": "dflash", "model": drafter, "num_speculative_tokens": 15}
    tree: dict[str, Any] = {"method": "ddtree", "model": drafter}
    if synthetic:
        chain |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": synthetic[0]}
        tree |= {"ddtree_synthetic_acceptance_length": synthetic[1]}
    found: dict[str, dict[str, Any]] = {
        "none": {},
        "chain": {
            "speculative_config": chain,
            "compilation_config": {"cudagraph_capture_sizes": graph_sizes(seqs, 16)},
        },
    }
    for count, deriver in itertools.product(nodes, derivers):
        name = f"tree{count or ''}" + ("" if deriver == "draw" else f"-{deriver}")
        # Only what is off the default: another checkout may call an option by another name.
        options = {"num_speculative_tokens": count} if count else {}
        options |= {} if deriver == "draw" else {"ddtree_deriver": deriver}
        found[name] = {"speculative_config": tree | options}
    return found
