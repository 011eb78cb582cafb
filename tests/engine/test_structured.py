"""Structured output and free requests in one batch, all verified as trees.

Every constraint of vLLM, on both backends that vLLM supports in full, greedy and sampled: always valid, and
the text of the run without speculation.
"""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest
from driving import scheduler
from engines import accepted_length, engine, engines, generate, greedy, prompts, runner, tree
from oracle import oracle
from tiny_models import MARKS
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22, 333]}, "ok": {"type": "boolean"}},
    "required": ["a", "ok"],
    "additionalProperties": False,
}
REGEX = "[a-f]{4}-[0-9]{3}"
EBNF = {
    "xgrammar": 'root ::= "(" item ("," item)? ")"\nitem ::= [a-c] [0-9]',
    "guidance": 'start: "(" item ("," item)? ")"\nitem: /[a-c][0-9]/',
}
EXPRESSION = r"\([a-c][0-9](,[a-c][0-9])?\)"
CALL = r"<call=get>(.*?)</call>"
# An enum has no white space, of which a model without training writes any amount.
ARGUMENT = {"enum": ["up", "down"]}
TAG = {
    "structures": [{"begin": "<call=get>", "schema": ARGUMENT, "end": "</call>"}],
    "triggers": ["<"],
}


def call_tag(backend):
    """A tool call that must come first; the tag format of the day is xgrammar's."""
    if backend == "guidance":
        return json.dumps(TAG)
    content = {"type": "json_schema", "json_schema": ARGUMENT}
    tag = {"type": "tag", "begin": "<call=get>", "content": content, "end": "</call>"}
    return json.dumps({"type": "structural_tag", "format": tag})


def requests(backend):
    def structured(changes=None, **kind):
        common = {"temperature": 0.0, "max_tokens": 44}
        wanted = StructuredOutputsParams(**kind)
        return SamplingParams(**(common | (changes or {})), structured_outputs=wanted)

    sampled = {"temperature": 1.0, "seed": 5}
    # The tag constrains a call once it has begun; the bias makes the tiny model begin one.
    begin = {"logit_bias": {ord("<") - 33: 8.0}} if backend == "guidance" else {}
    return [
        structured(regex=REGEX),
        greedy(10),
        structured(choice=["positive", "negative"]),
        structured(json=SCHEMA),
        SamplingParams(max_tokens=7, ignore_eos=True, **sampled),
        structured(sampled, json=SCHEMA),
        structured(grammar=EBNF[backend]),
        structured(sampled, regex=REGEX),
        structured({"max_tokens": 8}, json_object=True),
        structured(begin, structural_tag=call_tag(backend)),
        structured({"logprobs": 2, "max_tokens": 5}, regex=REGEX),
    ]


def answers(llm, backend):
    params = requests(backend)
    asked = [f"Request number {i}:" for i in range(len(params))]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [(o.prompt_token_ids, list(o.outputs[0].token_ids), o.outputs[0].text) for o in outputs]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_valid_and_equal_to_no_speculation(tiny, backend):
    settings = {
        "structured_outputs_config": {"backend": backend, "disable_any_whitespace": True},
        "max_num_seqs": 11,
        "max_num_batched_tokens": 2048,
    }
    with engines(tiny, tree(48), **settings) as (plain, ours):
        expected = answers(plain, backend)
        known = [prompt + tokens for prompt, tokens, _ in expected]
        # The true token is the third of its siblings, so a chain would accept nothing.
        with oracle(known):
            assert answers(ours, backend) == expected
        assert not runner(ours).tree_store.is_chain.any()
        assert accepted_length(ours) > 2.5
    texts = [text for *_, text in expected]
    for index in (0, 7):
        assert re.fullmatch(REGEX, texts[index])
    assert texts[2] in ("positive", "negative")
    for index in (3, 5):
        assert json.loads(texts[index]).keys() == {"a", "ok"}
    assert re.fullmatch(EXPRESSION, texts[6])
    assert texts[8].startswith("{")
    (call,) = re.findall(CALL, texts[9])[:1]
    # vLLM 0.32 hands guidance the tag's schema in a wrapper that lets any JSON through.
    assert json.loads(call) in ARGUMENT["enum"] or backend == "guidance"


def test_preempted_requests_go_on_in_their_grammar(tiny):
    """Too few blocks: what a grammar let through is prefilled again, and the grammar goes on from there."""
    code, tokens = "[a-f]{22}-[0-9]{5}", 30
    constraints = [{"regex": code}, None, {"json": SCHEMA}, {"regex": code}, None, {"regex": code}]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=kind is None,
            structured_outputs=kind and StructuredOutputsParams(**kind),
        )
        for kind in constraints
    ]
    # Printable characters: bytes of a broken one would join the first characters of the text.
    asked = [
        {"prompt_token_ids": [token % 94 for token in (p * 20)[: 20 + 9 * i]]}
        for i, p in enumerate(prompts(6, seed=3))
    ]
    settings = {
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "max_model_len": 128,
        "block_size": 32,
    }

    def answers(llm):
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [(list(o.outputs[0].token_ids), o.outputs[0].text) for o in outputs]

    preempted = []
    honest = Scheduler._preempt_request

    def preempt(self, request, *args, **kwargs):
        if request.use_structured_output:
            preempted.append(request.num_output_tokens)
        return honest(self, request, *args, **kwargs)

    with engine(tiny, **settings) as llm:
        expected = answers(llm)
    known = [a["prompt_token_ids"] + text for a, (text, _) in zip(asked, expected, strict=True)]
    with (
        oracle(known),
        mock.patch.object(Scheduler, "_preempt_request", preempt),
        engine(tiny, tree(20), num_gpu_blocks_override=6, **settings) as llm,
    ):
        assert answers(llm) == expected
        assert accepted_length(llm) > 1.5
    assert any(count > 0 for count in preempted), preempted
    for index in (0, 3, 5):
        assert re.fullmatch(code, expected[index][1])


def test_fewer_nodes_and_none_under_a_grammar(tiny):
    """Drafts narrower than the tree, and batches without any: parents travel in the width of the drafts."""
    code = "[a-f]{9}-[0-9]{5}"
    constraints = [{"regex": code}, {"json": SCHEMA}, None, {"regex": code}]
    settings = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    asked = prompts(4, seed=6)
    # One by one they end: batches of four and three without drafts, then of two and one with.
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=8 + 8 * i,
            ignore_eos=kind is None,
            structured_outputs=kind and StructuredOutputsParams(**kind),
        )
        for i, kind in enumerate(constraints)
    ]
    with engine(tiny, **settings) as llm:
        expected = generate(llm, asked, params)
    tiers = [(1, 1, 20), (2, 2, 6), (3, 4, 0)]
    known = [prompt + text for prompt, text in zip(asked, expected, strict=True)]
    with (
        oracle(known),
        engine(
            tiny, tree(20, num_speculative_tokens_per_batch_size=tiers), max_num_batched_tokens=64, **settings
        ) as llm,
    ):
        assert generate(llm, asked, params) == expected
        assert accepted_length(llm) > 1.3
        # Mask rows of real steps, 21 for one request and 7 for each of two, not 21 for each of four.
        assert scheduler(llm).structured_output_manager._grammar_bitmask.shape[0] <= 42
        assert runner(llm).structured_outputs_worker.grammar_bitmask.shape[0] == 64


@pytest.mark.parametrize("parser", ["qwen3", pytest.param("deepseek_r1", marks=pytest.mark.slow)])
def test_a_grammar_that_begins_behind_a_thought(marking, parser):
    """The end of a thought is a draft inside an accepted chain; the grammar begins right behind it."""
    end = 260 + MARKS.index("</think>")

    def thoughtful(changes=None, **kind):
        common = {"temperature": 0.0, "max_tokens": 70, "logit_bias": {end: 5.0}}
        wanted = StructuredOutputsParams(**kind) if kind else None
        return SamplingParams(**(common | (changes or {})), structured_outputs=wanted)

    sampled = {"temperature": 1.0, "seed": 5}
    params = [
        thoughtful(json=SCHEMA),
        thoughtful(regex=REGEX),
        thoughtful(sampled, json=SCHEMA),
        thoughtful(sampled, choice=["positive", "negative"]),
        thoughtful({"logit_bias": None, "max_tokens": 12}, regex=REGEX),
        thoughtful(regex=REGEX),
        thoughtful({"max_tokens": 20}),
    ]
    asked = [f"Thought number {i}:" for i in range(len(params))]
    asked[5] += "<think>Yes.</think>"
    settings = {
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "reasoning_parser": parser,
        "max_num_seqs": len(params),
        "max_num_batched_tokens": 1024,
    }

    def answers(llm):
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [(o.prompt_token_ids, list(o.outputs[0].token_ids), o.outputs[0].text) for o in outputs]

    with engines(marking, tree(20), **settings) as (plain, ours):
        expected = answers(plain)
        with oracle([prompt + tokens for prompt, tokens, _ in expected]):
            assert answers(ours) == expected
        assert runner(ours).tree_store.is_chain.sum() == len(params) - 1
        assert accepted_length(ours) > 2.5
    split = [text.partition("</think>")[::2] for *_, text in expected]
    assert len({len(thought) for thought, _ in split[:4]}) == 4
    for index in (0, 2):
        assert json.loads(split[index][1]).keys() == {"a", "ok"}
    assert re.fullmatch(REGEX, split[1][1])
    assert split[3][1] in ("positive", "negative")
    # Nothing is constrained before the end of a thought, and everything where it lies in the prompt.
    assert end not in expected[4][1] and not re.match("[a-f]", split[4][0])
    assert re.fullmatch(REGEX, split[5][0])


def test_chains_where_the_options_say_so(tiny):
    params = SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=REGEX)
    )
    with engine(tiny, tree(20, ddtree_grammar="chain"), async_scheduling=False) as llm:
        output = llm.generate("A code:", params, use_tqdm=False)[0].outputs[0]
        assert re.fullmatch(REGEX, output.text)
        assert runner(llm).tree_store.is_chain.any()


@pytest.mark.slow
def test_outlines(tiny):
    settings = {"structured_outputs_config": {"backend": "outlines"}, "max_num_batched_tokens": 1024}
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(**constraint)
        )
        for constraint in ({"regex": REGEX}, {"choice": ["positive", "negative"]})
    ]
    asked = ["A code:", "Is it good?"]
    with engines(tiny, tree(20), **settings) as llms:
        plain, ours = (llm.generate(asked, params, use_tqdm=False) for llm in llms)
    texts = [output.outputs[0].text for output in plain]
    assert [output.outputs[0].text for output in ours] == texts
    assert re.fullmatch(REGEX, texts[0]) and texts[1] in ("positive", "negative")
