"""The time of one decode step by stage, for Qwen3-8B's real shape with dummy weights.

    python scripts/bench_step.py --out result.json            (needs a GPU)

Every mode runs in a process of its own. GPU time is taken with CUDA events around the stages of the
model runner: verify (inputs, attention metadata, target forward), walk + commit (sampling included) and
draft + build (drafter forward included); host time per step is the wall clock over the same steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Run every mode, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        _measure(args)
        return
    rows: list[dict[str, Any]] = []
    for mode in ["none", "chain", *(f"tree{n}" for n in args.nodes)]:
        with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
            result = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--mode", mode],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        found = [json.loads(line[2:]) for line in result.stdout.splitlines() if line.startswith("@@")]
        if result.returncode:
            print(f"{mode}: failed\n{Path(log.name).read_text()[-2500:]}")
        for row in found:
            stages = " ".join(f"{k} {v:7.3f}" for k, v in row["gpu_ms"].items())
            place = f"{mode:>8} b={row['batch']:<3} ctx={row['context']:<6}"
            print(f"{place} wall {row['wall_ms']:7.3f} ms | {stages}", flush=True)
        rows += found
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1))


def _measure(args: argparse.Namespace) -> None:
    import torch
    from bench_models import write_configs
    from vllm import LLM, SamplingParams

    target, drafter = write_configs(Path(tempfile.mkdtemp()))
    mode, seqs = args.mode, max(args.batches)
    extra: dict[str, Any] = {}
    if mode == "chain":
        from bench_e2e import _sizes

        extra["speculative_config"] = {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": 15,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 7.79,
        }
        extra["compilation_config"] = {"cudagraph_capture_sizes": _sizes(seqs, 16)}
    elif mode != "none":
        extra["speculative_config"] = {
            "method": "ddtree",
            "model": str(drafter),
            "num_speculative_tokens": int(mode.removeprefix("tree")),
            "ddtree_synthetic_acceptance_length": 9.75,
        }
    llm = LLM(
        str(target),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(args.contexts) + 2048,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(16384, seqs * 600),
        enable_prefix_caching=True,
        gpu_memory_utilization=0.85,
        **extra,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    clock = _StageClock(runner, torch)
    for context in args.contexts:
        for batch in args.batches:
            prompts = [
                {"prompt_token_ids": [(i * 131 + j * 7) % 100_000 for j in range(context)]}
                for i in range(batch)
            ]
            tokens = args.steps * (1 if mode == "none" else 10)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
            clock.reset()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            torch.cuda.synchronize()
            row = clock.summary(batch) | {"mode": mode, "batch": batch, "context": context}
            row["seconds"] = time.perf_counter() - start
            row["tokens_per_second"] = batch * tokens / row["seconds"]
            print("@@" + json.dumps(row), flush=True)


class _StageClock:
    """CUDA events around the runner's stages; a step counts when its batch is all decodes."""

    def __init__(self, runner: Any, torch: Any) -> None:
        self._torch = torch
        self._steps: list[dict[str, Any]] = []
        self._wrap(runner, "execute_model", "verify")
        self._wrap(runner, "sample", "walk+commit")
        if runner.speculator is not None:
            self._wrap(runner.speculator, "propose", "draft+build")

    def reset(self) -> None:
        """Forget what was measured so far."""
        self._steps = []

    def _wrap(self, owner: Any, name: str, stage: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if stage == "verify":
                self._steps.append({"wall": time.perf_counter(), "rows": len(args[0].num_scheduled_tokens)})
            begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = original(*args, **kwargs)
            end.record()
            if self._steps:
                self._steps[-1][stage] = (begin, end)
            return result

        setattr(owner, name, timed)

    def summary(self, batch: int) -> dict[str, Any]:
        """Median GPU milliseconds per stage and wall milliseconds per step, first steps left out."""
        steps = [s for s in self._steps[4:-2] if s["rows"] == batch]
        stages = {}
        for stage in ("verify", "walk+commit", "draft+build"):
            times = [s[stage][0].elapsed_time(s[stage][1]) for s in steps if stage in s]
            if times:
                stages[stage] = statistics.median(times)
        walls = [b["wall"] - a["wall"] for a, b in itertools.pairwise(steps)]
        return {
            "gpu_ms": stages,
            "wall_ms": 1000 * statistics.median(walls) if walls else float("nan"),
            "steps": len(steps),
        }


if __name__ == "__main__":
    main()
