"""A real server: adapters that come and go, constrained answers, and processes that are killed under it.

The texts to get come from an engine without speculation in this process. One server serves the tests that
run by default, so the one that kills it comes last.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import GPU, engine, generate, greedy, prompts, tree
from servers import LONG, check_end, make_fault, server
from tiny_models import make_adapter
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

TOKENS = 12
CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}
SCHEMA = {
    "type": "object",
    "properties": {"way": {"enum": ["up", "down"]}, "steps": {"enum": [1, 22, 333]}},
    "required": ["way", "steps"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Where to?"}]
ADAPTERS = ("first", "second")
# As in test_lora.py: a slot more than adapters; the server unloads a name, the engine keeps its adapter.
SETTINGS = {"max_loras": 5, "max_lora_rank": 8, "max_num_seqs": 6, "max_num_batched_tokens": 1024}
if GPU:  # vLLM's LoRA kernels for GPUs take 16-bit types only
    SETTINGS["dtype"] = "float16"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(make_adapter(root / name, seed=i)) for i, name in enumerate(ADAPTERS, start=1)}


@pytest.fixture(scope="module")
def expected(tiny, adapters):
    """Texts without speculation: of every adapter, of long answers, and under constraints."""
    (prompt,) = prompts(1, seed=81)
    settings = SETTINGS | {"structured_outputs_config": CONSTRAINTS, "enable_lora": True}
    with engine(tiny, **settings) as llm:

        def adapted(name, number):
            request = LoRARequest(name, number, adapters[name])
            asked = {"prompt_token_ids": prompt}
            output = llm.generate(asked, greedy(TOKENS), lora_request=request, use_tqdm=False)
            return list(output[0].outputs[0].token_ids)

        params = SamplingParams(
            temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA)
        )
        texts = {name: adapted(name, i) for i, name in enumerate(ADAPTERS, start=1)}
        (texts["tiny"],) = generate(llm, [prompt], greedy(TOKENS))
        return {
            "prompt": prompt,
            "texts": texts,
            "long": generate(llm, prompts(3, seed=5), greedy(LONG)),
            "json": llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text,
        }


def start(pair, speculative, folder, **environment):
    flags = ("--enable-lora", "--structured-outputs-config", json.dumps(CONSTRAINTS))
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return server(pair, speculative, folder / "server.log", *flags, environment=environment, **SETTINGS)


@pytest.fixture(scope="module")
def ours(tiny, tmp_path_factory):
    with start(tiny, tree(16), tmp_path_factory.mktemp("log")) as running:
        yield running


def test_adapters_come_and_go_while_others_are_served(ours, adapters, expected):
    prompt, texts = expected["prompt"], expected["texts"]
    assert len({tuple(text) for text in texts.values()}) == 3

    def text(name):
        return ours.tokens(prompt, model=name, max_tokens=TOKENS)

    def load(name):
        return ours.http.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": adapters[name]}
        ).status_code

    def unload(name):
        return ours.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code

    with ThreadPoolExecutor(8) as pool:
        under_way = pool.submit(ours.tokens, prompts(3, seed=5)[0], max_tokens=60)
        for _ in range(2):
            assert ours.post("/v1/completions", model="first", prompt=prompt).status_code == 404
            assert (load("first"), text("first"), load("second")) == (200, texts["first"], 200)
            names = ["second", "tiny", "first", "second"]
            assert list(pool.map(text, names)) == [texts[name] for name in names]
            assert (unload("first"), text("second"), text("tiny")) == (200, texts["second"], texts["tiny"])
            assert unload("second") == 200
        assert under_way.result() == expected["long"][0][:60]
    page = ours.http.get("/metrics").text
    assert "vllm:spec_decode_num_accepted_tokens_total" in page


def test_json_and_tool_calls(ours, expected):
    assert json.loads(expected["json"]).keys() == {"way", "steps"}
    tool = {"type": "function", "function": {"name": "walk", "parameters": SCHEMA}}
    common = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    wanted = {"type": "json_schema", "json_schema": {"name": "walk", "schema": SCHEMA}}
    call = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "walk"}}}

    def message(**body):
        reply = ours.post("/v1/chat/completions", **common, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]

    assert message(response_format=wanted)["content"] == expected["json"]
    (called,) = message(**call)["tool_calls"]
    assert called["function"] == {"name": "walk", "arguments": expected["json"]}
    arguments = ""
    with ours.http.stream("POST", "/v1/chat/completions", json=common | call | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for part in choice["delta"].get("tool_calls") or ():
                        arguments += part["function"].get("arguments") or ""
    assert arguments == expected["json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculative", "name"), [(tree(16), "EngineCore"), (None, "EngineCore"), (None, "Worker")]
)
def test_a_killed_process_of_a_server_of_its_own(tiny, expected, tmp_path, speculative, name):
    with start(tiny, speculative, tmp_path) as running:
        check_end(running, lambda: running.kill(name), expected["long"])


@pytest.mark.slow
def test_an_error_in_a_step_ends_every_answer_with_an_error(tiny, expected, tmp_path):
    """On a GPU the error is a real one, a device-side assertion: CUDA reports it later, at another call."""
    trigger = make_fault(tmp_path)
    found_first = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with start(tiny, tree(16), tmp_path, PYTHONPATH=found_first) as running:
        check_end(running, trigger.touch, expected["long"])
        log = running.log.read_text()
    assert ("device-side assert" if GPU else "put here by a test") in log


def test_a_killed_worker_ends_every_answer_with_an_error(ours, expected):
    # On a GPU the engine process is its own worker.
    check_end(ours, lambda: ours.kill("EngineCore" if GPU else "Worker"), expected["long"])
