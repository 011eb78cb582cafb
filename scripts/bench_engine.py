"""One engine in a process of its own, driven by JSON lines: what the end-to-end benchmarks talk to.

Each mode (no speculation, chain, tree of N nodes) is one such process, so that all are up at once and
their measurements can be interleaved; only one of them works at any time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Engine:
    """The parent's side: start, wait until ready, ask, stop."""

    def __init__(self, name: str, llm_args: dict[str, Any], log: Path) -> None:
        self.name = name
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
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

    def ask(self, **message: Any) -> dict[str, Any]:
        """Generate once: prompts (text or token lists), temperature, max_tokens."""
        self._send(message)
        return self.receive()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _serve() -> None:
    args = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams

    llm = LLM(**args, disable_log_stats=False)
    _answer({"ready": True})
    before = _spec_counts(llm)
    for line in sys.stdin:
        ask = json.loads(line)
        params = SamplingParams(
            temperature=ask["temperature"],
            max_tokens=ask["max_tokens"],
            ignore_eos=True,
            seed=ask.get("seed"),
            logprobs=2 if ask.get("want_gaps") else None,
        )
        prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in ask["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        after = _spec_counts(llm)
        drafts, accepted = (b - a for a, b in zip(before, after, strict=True))
        before = after
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        _answer(
            {
                "seconds": seconds,
                "tokens": sum(map(len, tokens)),
                "accepted_length": 1 + accepted / drafts if drafts else 1.0,
                "output": tokens if ask.get("want_output") else None,
                "gaps": [_gaps(o.outputs[0].logprobs) for o in outputs] if ask.get("want_gaps") else None,
            }
        )


def _gaps(logprobs: Any) -> list[float]:
    """Log-probability of the best token less that of the second best, per position."""
    best = [sorted((entry.logprob for entry in row.values()), reverse=True) for row in logprobs]
    return [row[0] - row[1] for row in best]


def _spec_counts(llm: Any) -> tuple[int, int]:
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return (
        values.get("vllm:spec_decode_num_drafts", 0),
        values.get("vllm:spec_decode_num_accepted_tokens", 0),
    )


def _answer(message: dict[str, Any]) -> None:
    print("@@" + json.dumps(message), flush=True)


if __name__ == "__main__":
    _serve()
