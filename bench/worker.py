"""The engine's side of engines.py: one engine, asked and answering in JSON lines on stdin and stdout.

Owns what is measured inside: the clock of a step's stages, the count of what a warm engine must not do, the
profile. It knows vLLM's model runner and reads ddtree's functions by name; those that a checkout doesn't have
are left out.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  this folder's file names must not stand before vLLM's


def _serve() -> None:
    found = importlib.util.find_spec("vllm_ddtree")
    origin = found.origin if found else None
    _answer({"package": str(Path(origin).resolve().parents[1]) if origin else None})
    args = json.loads(sys.stdin.readline())
    from vllm import LLM

    llm = LLM(**args, disable_log_stats=False)
    clock = StageClock(llm)
    watch = _Watch()
    _answer({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        command = ask.get("command", "generate")
        if command == "watch":
            watch.start()
            _answer({})
        elif command == "counts":
            _answer(watch.stop())
        elif command == "profile":
            _profile(llm, Path(ask["path"]))
            _answer({})
        else:
            _answer(_generate(llm, clock, ask))


def _generate(llm: Any, clock: StageClock, ask: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=ask["temperature"],
        max_tokens=ask["max_tokens"],
        ignore_eos=True,
        seed=ask.get("seed"),
        logprobs=2 if ask.get("want_gaps") else None,
    )
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in ask["prompts"]]
    before = _spec_counts(llm)
    clock.start(bool(ask.get("want_stages")))
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    drafts, accepted = (b - a for a, b in zip(before, _spec_counts(llm), strict=True))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "seconds": seconds,
        "tokens": sum(map(len, tokens)),
        "accepted_length": 1 + accepted / drafts if drafts else 1.0,
        "output": tokens if ask.get("want_output") else None,
        "gaps": [_gaps(o.outputs[0].logprobs) for o in outputs] if ask.get("want_gaps") else None,
        "stages": clock.summary(len(prompts)) if ask.get("want_stages") else None,
    }


class StageClock:
    """CUDA events and host time around the runner's stages; a step counts when its batch is all decodes."""

    def __init__(self, llm: Any) -> None:
        self._on = False
        self._steps: list[dict[str, Any]] = []
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._wrap(runner, "execute_model", "verify")
        self._wrap(runner, "sample", "walk+commit")
        if runner.speculator is not None:
            self._wrap(runner.speculator, "propose", "draft+build")
        if hasattr(runner, "tree_step"):
            self._wrap_own()

    def start(self, on: bool) -> None:
        """Forget what was measured; measure from here on, or no more."""
        self._on, self._steps = on, []

    def _wrap_own(self) -> None:
        """What is ours outside the graphs; nothing of it where a checkout calls a part by another name."""
        from vllm_ddtree import step

        parts = [(step, name) for name in ("begin_step", "walk_rows", "commit_rows")]
        parts.append((getattr(step, "CacheMover", None), "move"))
        lacking = [name for owner, name in parts if not hasattr(owner, name)]
        if lacking:
            print(f"bench: no times of `own`: vllm_ddtree.step has no {', '.join(lacking)}", file=sys.stderr)
            return
        for owner, name in parts:
            self._wrap(owner, name, "own")

    def _wrap(self, owner: Any, name: str, stage: str) -> None:
        import torch

        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return original(*args, **kwargs)
            if stage == "verify":
                self._steps.append({"wall": time.perf_counter(), "rows": len(args[0].num_scheduled_tokens)})
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            started = time.perf_counter()
            result = original(*args, **kwargs)
            host = time.perf_counter() - started
            end.record()
            if self._steps:
                self._steps[-1].setdefault(stage, []).append((begin, end, host))
            return result

        setattr(owner, name, timed)

    def summary(self, batch: int) -> dict[str, Any]:
        """Median milliseconds per stage (GPU and host) and per step (wall), first and last steps left out."""
        import torch

        torch.cuda.synchronize()
        steps = [s for s in self._steps[4:-2] if s["rows"] == batch]
        gpu, host = {}, {}
        for stage in ("verify", "walk+commit", "draft+build", "own"):
            found = [s[stage] for s in steps if stage in s]
            if found:
                gpu[stage] = statistics.median(sum(a.elapsed_time(b) for a, b, _ in calls) for calls in found)
                host[stage] = 1000 * statistics.median(sum(t for _, _, t in calls) for calls in found)
        walls = [b["wall"] - a["wall"] for a, b in itertools.pairwise(steps)]
        wall = 1000 * statistics.median(walls) if walls else None
        return {"gpu_ms": gpu, "host_ms": host, "wall_ms": wall, "steps": len(steps)}


class _Watch:
    """Counts synchronisations (torch's sync debug mode), torch.compile graphs, Triton kernels, captures."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._syncs: collections.Counter[str] = collections.Counter()
        self._heard = False

    def start(self) -> None:
        import torch
        import triton

        self._counts.clear()
        self._syncs.clear()
        self._graphs = self._dynamo()
        triton.knobs.runtime.jit_post_compile_hook = self._compiled
        begin = torch.cuda.CUDAGraph.capture_begin

        def capture(*args: Any, **kwargs: Any) -> Any:
            self._counts["graph captures"] += 1
            return begin(*args, **kwargs)

        torch.cuda.CUDAGraph.capture_begin = capture
        warnings.simplefilter("always")
        warnings.showwarning = self._warned
        torch.cuda.set_sync_debug_mode("warn")
        torch.ones(1, device="cuda").item()
        if not self._heard:
            raise RuntimeError("a synchronisation on purpose was not reported; the count would mean nothing.")

    def stop(self) -> dict[str, Any]:
        import torch

        torch.cuda.set_sync_debug_mode("default")
        return {
            "torch.compile graphs": self._dynamo() - self._graphs,
            "triton compilations": self._counts["triton compilations"],
            "graph captures": self._counts["graph captures"],
            "syncs": dict(self._syncs),
        }

    @staticmethod
    def _dynamo() -> int:
        import torch

        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def _compiled(self, *_args: Any, already_compiled: bool = False, **_kwargs: Any) -> None:
        self._counts["triton compilations"] += not already_compiled

    def _warned(self, message: Any, *_args: Any, **_kwargs: Any) -> None:
        if "synchroniz" not in str(message):
            return
        self._heard = True
        frames = [f for f in traceback.extract_stack()[:-1] if "vllm" in f.filename]
        if frames:
            last = frames[-1]
            place = "/".join(last.filename.split("/")[-4:])
            self._syncs[f"{place}:{last.lineno} {last.name}"] += 1


def _profile(llm: Any, path: Path) -> None:
    import cProfile
    import pstats

    import torch
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    def run(name: str, measured: Callable[[], Any]) -> None:
        engine.add_request(name, {"prompt_token_ids": list(range(100, 160))}, params)
        for _ in range(10):
            engine.step()
        measured()
        while engine.has_unfinished_requests():
            engine.step()

    def steps() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(40):
            engine.step()
        return (time.perf_counter() - start) / 40

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    launches = torch.profiler.profile(activities=activities)
    python = cProfile.Profile()

    def launched() -> None:
        with launches:
            steps()

    with path.open("w") as out:
        run("plain", lambda: out.write(f"{steps() * 1000:.3f} ms per step\n"))
        run("launches", launched)
        run("python", lambda: python.runcall(steps))
        rows = launches.key_averages()
        for key in ("self_cpu_time_total", "self_cuda_time_total"):
            out.write(rows.table(sort_by=key, row_limit=40, max_name_column_width=60))
        stats = pstats.Stats(python, stream=out)
        stats.sort_stats("cumtime").print_stats(90)
        stats.sort_stats("tottime").print_stats(40)


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
