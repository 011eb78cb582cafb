"""Parameters that change logits: as a tree or as a chain, the text of the run without speculation."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engines import engines, generate, prompts, tree
from oracle import oracle
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_ddtree.engine import runner as runner_module
from vllm_ddtree.engine.chain import chain_reason, has_custom_processors
from vllm_ddtree.engine.proposer import TreeSpeculator

TOKENS = 8
NODES = 24
HORIZON = 7  # block size of the tiny drafter less the anchor
PRINTABLE = list(range(94))
LIMITS = {"max_num_seqs": 10, "max_num_batched_tokens": 1024}
COMMON = {"max_tokens": TOKENS, "ignore_eos": True}


def character(token):
    """The character of a printable id of the tiny tokenizer."""
    return chr(33 + token)


@pytest.fixture(scope="module")
def llms(tiny):
    thinking = {"reasoning_start_str": "<", "reasoning_end_str": ">"}
    with engines(tiny, tree(NODES), reasoning_config=thinking, **LIMITS) as both:
        yield both


def free(**changes):
    return SamplingParams(**({"temperature": 0.0} | COMMON | changes))


@contextlib.contextmanager
def shapes():
    """Collect (is chain, has more nodes than a chain can) of every draft."""
    seen = set()
    propose = TreeSpeculator.propose

    def spy(self, *args, **kwargs):
        drafts = propose(self, *args, **kwargs)
        rows = self.sample_idx_mapping[: drafts.shape[0] * self.horizon : self.horizon].tolist()
        for row in rows:
            seen.add((bool(self.store.is_chain[row]), int(self.store.num_nodes[row]) > HORIZON))
        return drafts

    with mock.patch.object(TreeSpeculator, "propose", spy):
        yield seen


def compare(llms, asked, params):
    """Both engines' texts, ours drafting the right answers; they must be equal."""
    plain = generate(llms[0], asked, params)
    with oracle([p + a for p, a in zip(asked, plain, strict=True)]), shapes() as seen:
        assert generate(llms[1], asked, params) == plain
    return plain, seen


def test_penalties_of_both_signs(llms):
    params = [
        free(repetition_penalty=1.6),
        free(repetition_penalty=0.5),
        free(frequency_penalty=1.9),
        free(frequency_penalty=-1.9),
        free(presence_penalty=1.9),
        free(presence_penalty=-1.9),
        free(),
        free(temperature=1.0, seed=7, repetition_penalty=1.4, frequency_penalty=-0.8, presence_penalty=1.1),
        free(temperature=0.9, seed=8, frequency_penalty=1.5, n=2),
    ]
    asked = prompts(len(params), seed=71)
    asked[7:] = [*asked[7:8], asked[8]]
    plain = generate(llms[0], asked, params)
    texts = [p + a for p, a in zip([*asked, asked[-1]], plain, strict=True)]
    with oracle(texts), shapes() as seen:
        assert generate(llms[1], asked, params) == plain
    assert seen == {(True, False), (False, True)}
    unprocessed = generate(llms[0], asked[:6], free())
    assert sum(a != b for a, b in zip(plain[:6], unprocessed, strict=True)) >= 4


def test_bad_words_at_every_offset(llms):
    (prompt,) = prompts(1, seed=72)
    base = {"allowed_token_ids": PRINTABLE}
    (answer,) = generate(llms[0], [prompt], free(**base))
    word = "".join(map(character, answer))
    params = [free(bad_words=[word[at : at + 1 + at % 3], "zz"], **base) for at in range(6)]
    params.append(free(temperature=1.2, seed=3, bad_words=[word[:1], word[1:3]], **base))
    plain, seen = compare(llms, [prompt] * len(params), params)
    assert seen == {(True, False)}
    assert all(text != answer for text in plain[:6])


def test_bias_allowed_tokens_and_min_p_stay_trees(llms):
    params = [
        free(logit_bias={65: 5.0, 66: -100.0}),
        free(temperature=0.7, seed=6, logit_bias={65: 5.0, 66: -100.0}),
        free(allowed_token_ids=list(range(60, 110))),
        free(temperature=1.0, seed=9, allowed_token_ids=[1, 2, 3], min_p=0.1),
        free(temperature=0.8, seed=4, min_p=0.05),
    ]
    asked = prompts(len(params), seed=73)
    (answer,) = generate(llms[0], asked[:1], free())
    params.append(free(logit_bias={answer[3]: -100.0}))  # a drafted token is banned
    _, seen = compare(llms, [*asked, asked[0]], params)
    assert seen == {(False, True)}


def test_thinking_budget(llms):
    """The end marker is forced once the budget is spent; requests beside it are free."""
    start, end = (ord(c) - 33 for c in "<>")
    asked = [[*p, start] for p in prompts(4, seed=74)]
    params = [free(thinking_token_budget=budget) for budget in (0, 3, 5)] + [free()]
    plain, seen = compare(llms, asked, params)
    assert seen == {(True, False), (False, True)}
    for text, budget in zip(plain, (0, 3, 5), strict=False):
        assert end in text[: budget + 1]


class NoneOfTheLastTwo(LogitsProcessor):
    """Forbids the two tokens before, for requests that ask for it; reads drafts in row order."""

    def __init__(self, vllm_config, req_states):
        self.tokens, self.lengths = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self.asked = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

    @classmethod
    def validate_params(cls, sampling_params):
        if not isinstance((sampling_params.extra_args or {}).get("no_echo", False), bool):
            raise ValueError("no_echo must be true or false")

    def add_request(self, req_idx, sampling_params):
        self.asked[req_idx] = bool((sampling_params.extra_args or {}).get("no_echo"))
        return bool(self.asked[req_idx])

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if self.asked[slot]:
                local = int(ctx.expanded_local_pos[row])
                length = int(self.lengths[slot])
                before = ctx.input_ids[row - 1] if local else self.tokens[slot, length - 2]
                logits[row, [int(ctx.input_ids[row]), int(before)]] = float("-inf")
        return logits


def test_custom_logits_processor(tiny):
    wanted = {"extra_args": {"no_echo": True}}
    params = [
        free(**wanted),
        free(),
        free(temperature=0.9, seed=2, **wanted),
        free(logit_bias={70: 6.0}, **wanted),
    ]
    asked = prompts(len(params), seed=75)
    with engines(tiny, tree(NODES), logits_processors=[NoneOfTheLastTwo], **LIMITS) as llms:
        with mock.patch.object(runner_module.logger, "info_once") as said:
            plain, seen = compare(llms, asked, params)
        with pytest.raises(VLLMValidationError, match="no_echo must be true or false"):
            generate(llms[1], asked[:1], free(extra_args={"no_echo": 3}))
    assert seen == {(True, False)}
    assert {call.args[1] for call in said.call_args_list} == {"custom logits processors"}
    echo = [text for text, p in zip(plain, params, strict=True) if p.extra_args]
    assert all(a not in (b, c) for text in echo for a, b, c in zip(text[2:], text[1:], text, strict=False))
    assert any(a == b for a, b in zip(plain[3], plain[3][2:], strict=False)) is False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"repetition_penalty": 0.9}, "a repetition penalty"),
        ({"frequency_penalty": -0.1}, "a frequency penalty"),
        ({"presence_penalty": 0.1}, "a presence penalty"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"thinking_token_budget": 0}, "a thinking budget"),
        ({"logit_bias": {1: 1.0}, "allowed_token_ids": [1], "min_tokens": 3, "min_p": 0.1}, None),
    ],
)
def test_reason_of_a_chain(changes, reason):
    assert chain_reason(SamplingParams(**changes), custom_processors=False) == reason


def test_processors_of_installed_plugins_make_chains():
    """vLLM also loads processors by entry point, which no config names."""
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

    stock = [cls.__new__(cls) for cls in (LogitBiasState, PenaltiesState, BadWordsState)]
    assert not has_custom_processors(SimpleNamespace(logits_processors=stock))
    ours = NoneOfTheLastTwo.__new__(NoneOfTheLastTwo)
    assert has_custom_processors(SimpleNamespace(logits_processors=[*stock, ours]))
