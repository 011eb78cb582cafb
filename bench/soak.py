"""A server (or an engine) under random load, watched for wrong text, stuck requests and leaks.

    python bench/soak.py --requests 300                         # server, bursts, disconnects, bad requests
    python bench/soak.py --offline --steps 5000                 # in process, random aborts
    python bench/soak.py --offline --steps 5000 --heap 5000     # the same, and what the memory is made of
    python bench/soak.py --restarts 5                           # start and stop an engine again and again
    python bench/soak.py --target DIR --drafter DIR --nodes 64  # any pair; without it tiny random models

The greedy answers that survivors must get come from an engine without speculation, in a process of its own.
Where rounding depends on the batch (a GPU, 16-bit types), an answer may part from them at a near tie of
the two best tokens; such answers are counted apart, and an engine without speculation reads each of them
afterwards: every token must be the best after those before it, but for the noise.
Writes a record; exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.records import Record
from vllm_ddtree.options import DEFAULT_NODES

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]  # tiny_models.py and demo.py
GPU = shutil.which("nvidia-smi") is not None
os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"})
if not GPU:
    os.environ.update({"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

KINDS = {"stream": 30, "whole": 20, "sampled": 10, "slow": 8, "disconnect": 14, "cancel": 8, "invalid": 10}
INVALID: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": -2},
    {"top_p": 7},
    {"model": "nobody"},
    {"prompt": [1] * 5000},
    {"prompt": [10**9]},
    {"prompt": {"no": "prompt"}},
    {"n": 0},
    {"logprobs": -7},
    {"max_tokens": "many"},
    {"structured_outputs": {"regex": "("}},
]
# Sampling parameters of the offline load's sampled requests.
VARIETY: list[dict[str, Any]] = [
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"logprobs": 3},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.2},
    {"min_tokens": 1, "stop_token_ids": list(range(0, 272, 3))},
    {"logit_bias": {70: 3.0}},
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="folder of the target; default: tiny random models")
    parser.add_argument("--drafter", help="folder of its DFlash drafter")
    parser.add_argument("--nodes", type=int, default=16, help="0: the default schedule")
    parser.add_argument("--method", choices=("ddtree", "dflash", "none"), default="ddtree")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=48, help="KV blocks; few of them cause preemption")
    parser.add_argument("--block-size", type=int, default=None if GPU else 32)
    parser.add_argument("--eager", action="store_true", default=not GPU)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=24, help="different prompts")
    parser.add_argument("--texts", action="store_true", help="prompts are texts, for a target that reads")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--steps", type=int, default=0, help="go on until so many engine steps, too")
    parser.add_argument("--seconds", type=int, default=0, help="stop sending after this time")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--offline", action="store_true")
    parser.add_argument(
        "--heap", type=int, default=0, metavar="STEPS", help="offline: watch the heap for so long"
    )
    parser.add_argument("--trace", action="store_true", help="with --heap: tracemalloc over the second half")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="soak.json")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": args.dtype,
        "enforce_eager": args.eager,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": max(512, args.max_num_seqs * (2 * (args.nodes or DEFAULT_NODES) + 1)),
        "num_gpu_blocks_override": args.blocks,
        "block_size": args.block_size,
        "disable_log_stats": False,
        # On a GPU that others use too, where vLLM's profiling fails as soon as one of them gives memory back.
        **({"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 2**30} if GPU else {}),
    }


def speculative(args: argparse.Namespace) -> dict[str, Any] | None:
    """The speculative config; the other methods are there to compare memory with."""
    if args.method == "none":
        return None
    tokens = args.nodes if args.method == "ddtree" else min(args.nodes or 7, 7)
    return {"method": args.method, "model": args.drafter, "num_speculative_tokens": tokens or None}


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Prompts of ragged lengths, bytes unless texts are asked for; half begin alike for the prefix cache."""
    draw = random.Random(args.seed)
    longest = args.max_model_len - args.max_tokens
    if args.texts:
        from transformers import AutoTokenizer

        from bench.e2e import CHAT

        encode = AutoTokenizer.from_pretrained(args.target).encode
        texts = [encode(CHAT[i % len(CHAT)] + "\n") for i in range(args.prompts)]
        preamble = encode("Answer the question below in plain words, and say why. ")
        return [(preamble * 4 * (i // len(CHAT) % 2) + text)[:longest] for i, text in enumerate(texts)]
    shared = [draw.randrange(32, 127) for _ in range(longest // 2)]
    found = []
    for i in range(args.prompts):
        own = [draw.randrange(32, 127) for _ in range(draw.randint(1, longest // 3))]
        found.append(shared + own if i % 2 else own)
    return found


def memory(process: psutil.Process) -> dict[str, float]:
    """MiB of a process and of its children, by name."""
    found: dict[str, float] = {}
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found[one.name()] = found.get(one.name(), 0.0) + one.memory_info().rss / 2**20
    return found


def device_memory() -> dict[str, float]:
    """MiB that this process's tensors hold on its GPU, and that it keeps for them."""
    if not GPU:
        return {}
    import torch

    held = {"tensors": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return {f"GPU {name}": size / 2**20 for name, size in held.items()}


def accepted_length(counters: dict[str, float], suffix: str) -> float:
    """Mean tokens per verification, from vLLM's counters."""
    drafts, accepted = (
        counters.get(f"vllm:spec_decode_num_{name}{suffix}", 0) for name in ("drafts", "accepted_tokens")
    )
    return round(1 + accepted / max(drafts, 1), 3)


def growth(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Memory over time: for each process, the median of every tenth of the samples."""
    tenth = max(len(samples) // 10, 1)
    parts = [samples[i : i + tenth] for i in range(0, len(samples), tenth)]
    names = sorted({name for sample in samples for name in sample})

    def median(part: list[dict[str, float]], name: str) -> int:
        return round(sorted(sample.get(name, 0.0) for sample in part)[len(part) // 2])

    return {
        "samples": len(samples),
        "mib_by_tenths": {n: [median(p, n) for p in parts] for n in names},
    }


# Parts that run in a process of their own, so that their memory is theirs alone.


def answers(args: argparse.Namespace) -> list[dict[str, list[Any]]]:
    """The greedy text of every prompt without speculation, and how far ahead each token was."""
    from vllm import LLM, SamplingParams

    llm = LLM(args.target, **engine_settings(args))
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=2)
    asked = [{"prompt_token_ids": prompt} for prompt in make_prompts(args)]
    found = []
    for output in llm.generate(asked, params, use_tqdm=False):
        two = [sorted(e.logprob for e in place.values())[-2:] for place in output.outputs[0].logprobs]
        gaps = [best - second for second, best in two]
        found.append({"tokens": list(output.outputs[0].token_ids), "gaps": gaps})
    return found


def noise(args: argparse.Namespace) -> float:
    """Log units by which rounding may move a token from the best; 0 where it does not depend on the batch."""
    from bench.check import NOISE

    return NOISE[args.dtype] if GPU or args.dtype != "float32" else 0.0


class Answers:
    """Compares what was said with the text without speculation."""

    def __init__(self, args: argparse.Namespace, expected: list[dict[str, list[Any]]]) -> None:
        self.expected, self.noise = expected, noise(args)
        self.wrong: list[Any] = []
        self.parted: set[tuple[int, tuple[int, ...]]] = set()

    def compare(self, which: int, length: int, tokens: list[int], **where: Any) -> str:
        """``equal``, ``near tie`` or ``wrong``."""
        right, gaps = self.expected[which]["tokens"][:length], self.expected[which]["gaps"]
        if tokens == right:
            return "equal"
        at = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), None)
        if len(tokens) == len(right) and at is not None and gaps[at] < self.noise:
            self.parted.add((which, tuple(tokens)))
            return "near tie"
        gap = None if at is None else gaps[at]
        self.wrong.append({"prompt": which, "length": length, "at": at, "gap": gap, "got": tokens} | where)
        return "wrong"

    def report(self) -> dict[str, list[Any]]:
        """What was wrong, and which answers parted at a near tie."""
        return {"wrong_text": self.wrong, "parted": sorted(self.parted)}


def load(args: argparse.Namespace, number: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Request ``number`` of the offline load: the same whatever the engine does with it."""
    draw = random.Random(f"{args.seed}/{number}")
    which, length = draw.randrange(len(prompts)), draw.randint(1, args.max_tokens)
    aborted = draw.randint(0, args.max_tokens) if draw.random() < 0.06 else None
    found = {"which": which, "prompt": prompts[which], "aborted": aborted}
    params: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "temperature": 0.0}
    if draw.random() < 0.4:
        fresh = [draw.randrange(32, 127) for _ in range(draw.randint(1, args.max_model_len // 3))]
        found |= {"which": -1, "prompt": fresh}
        params |= {"temperature": 1.0, "seed": number} | draw.choice(VARIETY)
    return found | {"params": params}


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one engine in this process: random arrivals and aborts, now few requests at once, now many."""
    from vllm import LLM, SamplingParams

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    checked = Answers(args, json.loads(os.environ["SOAK_ANSWERS"]))
    draw, prompts = random.Random(args.seed + 1), make_prompts(args)
    llm = LLM(args.target, speculative_config=speculative(args), **engine_settings(args))
    work, process = llm.llm_engine, psutil.Process()
    running: dict[str, dict[str, Any]] = {}
    counts, samples, steps, sent, most = Counter(), [], 0, 0, 0
    watch = Watch(args) if args.heap else None
    begun = time.monotonic()
    while True:
        late = bool(args.seconds) and time.monotonic() - begun > args.seconds
        if steps % 100 == 0:
            most = draw.randint(1, args.max_num_seqs + 4)
        if not late and steps < args.steps and len(running) < most and draw.random() < 0.5:
            asked = load(args, sent, prompts)
            running[str(sent)] = asked | {"since": steps}
            prompt = {"prompt_token_ids": asked["prompt"]}
            work.add_request(str(sent), prompt, SamplingParams(**asked["params"]))
            sent += 1
        for name, asked in list(running.items()):
            if asked["aborted"] is not None and steps - asked["since"] >= asked["aborted"]:
                work.abort_request([name])
                del running[name]
                counts["aborted"] += 1
        for output in work.step():
            if not output.finished or output.request_id not in running:
                continue
            asked = running.pop(output.request_id)
            which, length = asked["which"], asked["params"]["max_tokens"]
            counts["finished"] += 1
            if which >= 0:
                counts[checked.compare(which, length, list(output.outputs[0].token_ids))] += 1
        steps += 1
        if steps % 50 == 0:
            samples.append(memory(process) | device_memory())
        if watch is not None:
            watch.step(steps, sent)
        if steps % 1000 == 0:
            print(
                f"[soak] {steps} steps, {time.monotonic() - begun:.0f} s, {dict(counts)}, {samples[-1]}",
                file=sys.stderr,
                flush=True,
            )
        if not running and (steps >= args.steps or late):
            break
    for _ in range(3):
        work.step()
    pool = work.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "mode": "offline",
        "steps": steps,
        "seconds": round(time.monotonic() - begun),
        "requests": {"sent": sent, **counts},
        **checked.report(),
        "accepted_length": accepted_length(values, ""),
        "kv_blocks_in_use_at_end": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "preemptions": values.get("vllm:num_preemptions", 0),
        "memory": growth(samples),
        **({"heap": watch.report()} if watch else {}),
    }


def judge(args: argparse.Namespace) -> dict[str, Any]:
    """How far each token of the answers that parted is from the best, by an engine without speculation."""
    from vllm import LLM, SamplingParams

    parted = json.loads(Path(os.environ["SOAK_PARTED"]).read_text())
    prompts = make_prompts(args)
    llm = LLM(args.target, **engine_settings(args))
    asked = [{"prompt_token_ids": prompts[which] + tokens} for which, tokens in parted]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    worst, wrong = 0.0, []
    for (which, tokens), output in zip(parted, llm.generate(asked, params, use_tqdm=False), strict=True):
        rows = output.prompt_logprobs[len(prompts[which]) :]
        gaps = [
            max(entry.logprob for entry in row.values()) - row[token].logprob
            for token, row in zip(tokens, rows, strict=True)
        ]
        worst = max(worst, *gaps)
        if max(gaps) >= noise(args):
            wrong.append({"prompt": which, "got": tokens, "at": gaps.index(max(gaps)), "gap": max(gaps)})
    return {"answers": len(parted), "largest_gap": round(worst, 3), "wrong": wrong}


class Watch:
    """The engine's heap over its steps (heap.py), 20 rows, and what grew in its second half."""

    def __init__(self, args: argparse.Namespace) -> None:
        from bench import heap

        self.heap, self.every, self.trace = heap, max(args.heap // 20, 1), args.trace
        self.half, self.rows = args.heap // 2, []
        self.before: Any = None
        self.traced: Any = None

    def step(self, steps: int, sent: int) -> None:
        if steps % self.every == 0:
            self.rows.append({"steps": steps, "sent": sent} | self.heap.snapshot())
        if self.before is None and steps >= self.half:
            self.before = self.heap.Containers()
            if self.trace:
                import tracemalloc

                tracemalloc.start()
                self.traced = tracemalloc.take_snapshot()

    def report(self) -> dict[str, Any]:
        found = {"rows": self.rows, "trimmed": self.heap.trim()}
        if self.before is not None:
            found["grown_in_second_half"] = self.before.grown(20)
        if self.traced is not None:
            import tracemalloc

            top = tracemalloc.take_snapshot().compare_to(self.traced, "lineno")
            found["traced"] = [str(one) for one in top[:15]]
        return found


def restarts(args: argparse.Namespace) -> dict[str, Any]:
    """Engines one after the other, each with an engine process of its own; what stays behind."""
    import gc

    from vllm import LLM, SamplingParams

    checked = Answers(args, json.loads(os.environ["SOAK_ANSWERS"]))
    prompts, process, rows = make_prompts(args)[:4], psutil.Process(), []
    for _ in range(args.restarts):
        began = time.monotonic()
        llm = LLM(args.target, speculative_config=speculative(args), **engine_settings(args))
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        for which, output in enumerate(outputs):
            checked.compare(which, 4, list(output.outputs[0].token_ids))
        llm.llm_engine.engine_core.shutdown()
        del llm, outputs
        gc.collect()
        rows.append(
            {
                "seconds": round(time.monotonic() - began, 1),
                "mib": round(process.memory_info().rss / 2**20),
                "children": [" ".join(one.cmdline())[-60:] for one in process.children(recursive=True)],
                "open_files": process.num_fds(),
                "threads": process.num_threads(),
            }
        )
    return {"mode": "restarts", "engines": rows, **checked.report()}


def inside(args: argparse.Namespace, part: str, environment: dict[str, str]) -> Any:
    """Run a part of this file in a process of its own and return what it found."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, __file__, *sys.argv[1:], "--inside", part, "--output", result.name]
        command += ["--target", args.target, "--drafter", args.drafter]
        subprocess.run(command, check=True, env=os.environ | environment)
        return json.loads(Path(result.name).read_text())


# The server and its clients.


def start_server(args: argparse.Namespace, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.target]
    command += ["--served-model-name", "soaked", "--host", "127.0.0.1", "--port", str(port)]
    for key, value in engine_settings(args).items():
        if value is None:
            continue
        if value is True:
            command.append("--" + key.replace("_", "-"))
        elif value is not False:
            command += ["--" + key.replace("_", "-"), str(value)]
    if args.method != "none":
        command += ["--speculative-config", json.dumps(speculative(args))]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    return process, f"http://127.0.0.1:{port}"


def metrics(base: str) -> dict[str, float]:
    """Sums of the counters and gauges of the metrics page, by name."""
    page = urllib.request.urlopen(f"{base}/metrics", timeout=60).read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", page, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


class Clients:
    """Random requests of every kind, and what became of them."""

    def __init__(self, args: argparse.Namespace, base: str, checked: Answers) -> None:
        import httpx

        self.args, self.checked = args, checked
        self.draw, self.prompts = random.Random(args.seed + 2), make_prompts(args)
        # Server and client both drop an idle connection after 5 s: reused just then, it fails.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=base, timeout=900, limits=fresh)
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    async def one(self, gate: asyncio.Semaphore) -> None:
        kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        which, length = self.draw.randrange(len(self.prompts)), self.draw.randint(1, self.args.max_tokens)
        body = {
            "model": "soaked",
            "prompt": self.prompts[which],
            "max_tokens": length,
            "temperature": 1.0 if kind == "sampled" else 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": kind in ("stream", "slow", "disconnect"),
        }
        async with gate:
            try:
                tokens = await asyncio.wait_for(getattr(self, f"_{kind}", self._whole)(body), 900)
            except asyncio.TimeoutError:
                self.failed.append(f"{kind}: stuck for 900 s")
                return
            except Exception as error:
                self.failed.append(f"{kind}: {error!r}")
                return
        self.counts[kind] += 1
        if tokens is not None and kind != "sampled":
            self.counts[self.checked.compare(which, length, tokens, kind=kind)] += 1

    async def _whole(self, body: dict[str, Any]) -> list[int] | None:
        reply = await self.http.post("/v1/completions", json=body)
        reply.raise_for_status()
        return reply.json()["choices"][0]["token_ids"]

    async def _stream(self, body: dict[str, Any], pause: float = 0, leave: int = 10**9) -> list[int] | None:
        tokens: list[int] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
                    leave -= 1
                    if leave <= 0:
                        return None
                    await asyncio.sleep(pause)
        return tokens

    async def _slow(self, body: dict[str, Any]) -> list[int] | None:
        return await self._stream(body, pause=self.draw.uniform(0.2, 2.0))

    async def _disconnect(self, body: dict[str, Any]) -> None:
        await self._stream(body, leave=self.draw.randint(1, 4))

    async def _cancel(self, body: dict[str, Any]) -> list[int] | None:
        try:
            return await asyncio.wait_for(self._whole(body), self.draw.uniform(0.0, 3.0))
        except asyncio.TimeoutError:
            self.counts["cancelled before the answer"] += 1
            return None

    async def _invalid(self, body: dict[str, Any]) -> None:
        body |= self.draw.choice(INVALID)
        reply = await self.http.post("/v1/completions", json=body)
        if not 400 <= reply.status_code < 500:
            raise ValueError(
                f"status {reply.status_code} for { ({k: body[k] for k in body if k != 'prompt'}) }"
            )

    async def storm(self, base: str, server: psutil.Process, samples: list[dict[str, float]]) -> None:
        """Bursts until the wanted requests and steps are done; memory every two seconds."""
        gate, tasks, sent = asyncio.Semaphore(self.args.concurrency), set(), 0
        begun = sampled = time.monotonic()
        while True:
            steps = 0.0
            if self.args.steps and sent >= self.args.requests:
                steps = (await asyncio.to_thread(metrics, base)).get("vllm:iteration_tokens_total_count", 0)
            if sent >= self.args.requests and steps >= self.args.steps:
                break
            if self.args.seconds and time.monotonic() - begun > self.args.seconds:
                break
            if len(tasks) < 2 * self.args.concurrency:
                for _ in range(self.draw.randint(1, self.args.concurrency)):
                    task = asyncio.create_task(self.one(gate))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    sent += 1
            await asyncio.sleep(self.draw.uniform(0.1, 2.0))
            if time.monotonic() - sampled > 2:
                sampled = time.monotonic()
                samples.append(await asyncio.to_thread(memory, server))
                print(f"\r[soak] {sent} sent, {dict(self.counts)}", end="", file=sys.stderr, flush=True)
        await asyncio.gather(*tasks)
        print(file=sys.stderr)
        await self.http.aclose()


def serve(args: argparse.Namespace, checked: Answers) -> dict[str, Any]:
    import demo

    log = Path(args.output).with_suffix(".log")
    process, base = start_server(args, log)
    try:
        demo.wait(process, base, "soak", log)
        clients, samples = Clients(args, base, checked), []
        begun = time.monotonic()
        asyncio.run(clients.storm(base, psutil.Process(process.pid), samples))
        seconds, idle = time.monotonic() - begun, {}
        for _ in range(60):
            idle = metrics(base)
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
            left = {name: idle[name] for name in names}
            if not any(left.values()):
                break
            time.sleep(1)
        return {
            "mode": "server",
            "steps": int(idle.get("vllm:iteration_tokens_total_count", 0)),
            "seconds": round(seconds),
            "requests": dict(clients.counts),
            **checked.report(),
            "failed": clients.failed,
            "left_at_end": left,
            "preemptions": idle.get("vllm:num_preemptions_total", 0),
            "accepted_length": accepted_length(idle, "_total"),
            "server_alive": process.poll() is None,
            "memory": growth(samples),
            "errors_in_log": len(re.findall(r"^.*(?:ERROR|Traceback).*$", log.read_text(), re.M)),
        }
    finally:
        demo.stop(process)


def good(report: dict[str, Any]) -> bool:
    bad = bool(report["wrong_text"] or report.get("failed") or report.get("kv_blocks_in_use_at_end"))
    bad |= any(report.get("left_at_end", {}).values()) or not report.get("server_alive", True)
    return not bad and not any("VLLM" in str(row["children"]) for row in report.get("engines", []))


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.inside:
        part = {"answers": answers, "offline": offline, "restarts": restarts, "judge": judge}[args.inside]
        Path(args.output).write_text(json.dumps(part(args)))
        return 0
    record = Record(Path(args.output), args)
    with tempfile.TemporaryDirectory() as folder:
        if args.target is None:
            import tiny_models

            args.target = str(tiny_models.make_target(Path(folder) / "target"))
            args.drafter = str(tiny_models.make_drafter(Path(folder) / "drafter"))
        if args.heap:
            # oneDNN keeps 1,024 kernels, one per matrix and count of rows: a growth that would hide others.
            os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
        expected = inside(args, "answers", {})
        known = {"SOAK_ANSWERS": json.dumps(expected)}
        if args.restarts:
            report = inside(args, "restarts", known)
        elif args.offline:
            report = inside(args, "offline", known)
        else:
            report = serve(args, Answers(args, expected))
        if parted := report.pop("parted", None):
            listed = Path(folder) / "parted.json"
            listed.write_text(json.dumps(parted))
            report["near_ties_read_again"] = inside(args, "judge", {"SOAK_PARTED": str(listed)})
            report["wrong_text"] += report["near_ties_read_again"].pop("wrong")
    report["good"] = good(report)
    record.write([report])
    print(json.dumps(report, indent=1))
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
