"""A real server: adapters that come and go, constrained answers, tool calls, thoughts, killed processes.

The texts to get come from an engine without speculation in this process. One server serves the tests that
run by default, so the one that kills it comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import GPU, engine, generate, greedy, prompts, tree
from servers import LONG, check_end, make_fault, server
from tiny_models import MARKS, make_adapter
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.utils import get_json_schema_from_tools

TOKENS = 12
MOST = 130
CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}
SCHEMA = {
    "type": "object",
    "properties": {"way": {"enum": ["up", "down"]}, "steps": {"enum": [1, 22, 333]}},
    "required": ["way", "steps"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Where to?"}]
TOOL = {"type": "function", "function": {"name": "walk", "parameters": SCHEMA}}
CALL = r"walk\(way='(up|down)', steps=(1|22|333)\)"
CALLS = rf"\[{CALL}, {CALL}\]"
ADAPTERS = ("first", "second")
# As in test_lora.py: a slot more than adapters; the server unloads a name, the engine keeps its adapter.
SETTINGS = {
    "max_loras": 5,
    "max_lora_rank": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,  # for ENDLESS answers
}
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
            "chats": chats(llm),
        }


def question(number):
    return [{"role": "user", "content": f"Where to, number {number}?"}]


def chats(llm):
    """Prompts, tokens and texts of what the server asks the engine in test_tool_choices."""
    asked = ChatCompletionToolsParam(**TOOL)
    constraints = [
        {"json": get_json_schema_from_tools("required", [asked])},
        {"regex": CALLS},
        None,
    ]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=MOST,
            structured_outputs=kind and StructuredOutputsParams(**kind),
        )
        for kind in constraints
    ]
    messages = [question(number) for number in range(len(params))]
    outputs = llm.chat(messages, params, use_tqdm=False)
    return [(o.prompt_token_ids, list(o.outputs[0].token_ids), o.outputs[0].text) for o in outputs]


def start(pair, speculative, folder, **environment):
    flags = ("--enable-lora", "--structured-outputs-config", json.dumps(CONSTRAINTS))
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    settings = SETTINGS | {"environment": environment, "known": True}
    return server(pair, speculative, folder / "server.log", *flags, **settings)


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
    common = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    wanted = {"type": "json_schema", "json_schema": {"name": "walk", "schema": SCHEMA}}
    call = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "walk"}}}
    _, answer = ours.chat(**common, response_format=wanted)
    assert answer.content == expected["json"]
    _, answer = ours.chat(**common, **call)
    assert answer.calls == ours.stream(**common, **call).calls == [("walk", expected["json"])]


def all_at_once(running, bodies):
    """Answers of all chats together: their prompts, whole and streamed."""
    with ThreadPoolExecutor(2 * len(bodies)) as pool:
        streams = [pool.submit(running.stream, **body) for body in bodies]
        wholes = [pool.submit(running.chat, **body) for body in bodies]
        prompts, wholes = zip(*(whole.result() for whole in wholes), strict=True)
        return prompts, list(wholes), [stream.result() for stream in streams]


def test_tool_choices(ours, expected):
    """Required, and auto with and without calls, all trees beside each other, whole and streamed."""
    bodies = [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "auto", "structured_outputs": {"regex": CALLS}},
        {"tools": [TOOL], "tool_choice": "auto"},
    ]
    common = {"temperature": 0, "max_tokens": MOST}
    bodies = [common | body | {"messages": question(number)} for number, body in enumerate(bodies)]
    before = ours.drafts()
    with ours.knowing([prompt + tokens for prompt, tokens, _ in expected["chats"]]):
        prompts, wholes, streams = all_at_once(ours, bodies)
    drafts, drafted, accepted = (now - then for now, then in zip(ours.drafts(), before, strict=True))
    assert drafted == 16 * drafts  # a chain has 7 nodes
    assert accepted > 0.5 * drafts

    assert list(prompts) == [prompt for prompt, *_ in expected["chats"]]
    for answers in (wholes, streams):
        assert [answer.tokens for answer in answers] == [tokens for _, tokens, _ in expected["chats"]]
    required, called, free = (text for *_, text in expected["chats"])
    calls = [(call["name"], call["parameters"]) for call in json.loads(required)]
    calls_at_will = [("walk", {"way": way, "steps": int(steps)}) for way, steps in re.findall(CALL, called)]
    assert len(calls) >= 1 and len(calls_at_will) == 2
    for answers in (wholes, streams):
        assert [answer.content for answer in answers] == ["", "", free]
        assert [answer.reason for answer in answers] == ["tool_calls", "tool_calls", "stop"]
        found = [[(name, json.loads(wanted)) for name, wanted in answer.calls] for answer in answers]
        assert found == [calls, calls_at_will, []]


# A bias makes the tiny model end its thought and begin a call. White space, of which a grammar allows any
# amount, is out, and so are broken characters: a stream of deepseek_r1 may lose those before "</think>",
# without speculation.
END, CALLING = (str(260 + MARKS.index(mark)) for mark in ("</think>", "<tool_call>"))
PRINTED = {str(token): -100 for token in range(94, 272)}


def parsed_bodies():
    """Chats that vLLM's parsers take apart; the last is free."""
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    wanted = {"type": "json_schema", "json_schema": {"name": "walk", "schema": SCHEMA}}
    named = {"type": "function", "function": {"name": "walk"}}
    one = {"tools": [strict], "parallel_tool_calls": False}
    bodies = [
        ({END: 3}, {"response_format": wanted}),
        ({END: 5}, {"response_format": wanted, "temperature": 1, "seed": 3}),
        ({END: 5}, one | {"tool_choice": "required"}),
        ({END: 5}, one | {"tool_choice": named}),
        ({END: 5, CALLING: 4}, one | {"tool_choice": "auto"}),
        # A call in the middle of a thought, which ends it for qwen3.
        ({END: 5, CALLING: 5}, one | {"tool_choice": "auto"}),
        ({END: 5, CALLING: 4}, {"tools": [TOOL], "tool_choice": "auto", "max_tokens": 30}),
        ({END: 4}, {"max_tokens": 40}),
    ]
    common = {"temperature": 0, "max_tokens": MOST}
    return [
        common | body | {"messages": question(number), "logit_bias": PRINTED | bias}
        for number, (bias, body) in enumerate(bodies)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
def test_parsed_answers_equal_a_server_without_speculation(marking, tmp_path, reasoning):
    """Thoughts, then constrained text or tool calls, from two servers that differ in speculation only."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--reasoning-parser", reasoning] if reasoning else []
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 1024}
    bodies = parsed_bodies()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def begin(name, speculative):
            log = tmp_path / f"{name}.log"
            known = speculative is not None
            return stack.enter_context(server(marking, speculative, log, *flags, known=known, **settings))

        plain, ours = pool.map(begin, ("plain", "ours"), (None, tree(16)))
        prompts, *expected = all_at_once(plain, bodies)
        known = [p + answer.tokens for p, answer in zip(prompts, expected[0], strict=True)]
        with ours.knowing(known):
            _, *found = all_at_once(ours, bodies)
        drafts, drafted, accepted = ours.drafts()
    for answers, right in zip(found, expected, strict=True):
        assert answers == right
    assert accepted > 0.5 * drafts
    # Behind a reasoning parser what is constrained is a chain of 7 nodes; the rest is trees.
    assert drafted < 16 * drafts if reasoning else drafted == 16 * drafts
    for answers in expected:
        for answer in answers[:2]:
            assert json.loads(answer.content).keys() == {"way", "steps"} and answer.reason == "stop"
        for answer in answers[2:6]:
            ((name, arguments),) = answer.calls
            assert name == "walk" and json.loads(arguments).keys() == {"way", "steps"}
        assert [answer.reason for answer in answers[2:6]] == ["tool_calls", "stop", *["tool_calls"] * 2]
        thoughts = [answer.reasoning for answer in answers]
        assert all(thoughts) if reasoning else not any(thoughts)
        assert reasoning is None or len(set(thoughts)) > 2


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
