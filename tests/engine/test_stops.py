"""Where a request ends: text, reasons and counts of the run without speculation, at every offset of a path.

An oracle drafts the known answer (behind wrong siblings), so that most steps commit several tokens and
stops fall into the middle of an accepted path.
"""

from __future__ import annotations

import pytest
from engines import accepted_length, engines, prompts, tree
from oracle import oracle
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

TOKENS = 10
OFFSETS = range(1, 8)
EOS = 259
# Ids 0 to 93 of the tiny tokenizer are the printable ASCII characters: one character per token.
PRINTABLE = list(range(94))


@pytest.fixture(scope="module")
def llms(tiny):
    with engines(tiny, tree(40), max_num_seqs=8, max_num_batched_tokens=1024) as both:
        yield both


def params(**changes):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": TOKENS} | changes))


def ends(llm, asked, wanted):
    """Everything a client sees of how each request ended."""
    inputs = [{"prompt_token_ids": p} for p in asked]
    outputs = llm.generate(inputs, wanted, use_tqdm=False)
    return [
        (list(o.token_ids), o.text, o.finish_reason, o.stop_reason, len(o.logprobs or ()))
        for output in outputs
        for o in output.outputs
    ]


def printable(seed):
    """A prompt of printable characters: bytes of a broken one would join the first characters of the text."""
    return [token % 94 for token in prompts(1, seed=seed)[0]]


def same_ends(llms, asked, wanted, known=None):
    """Both engines' ends must be equal, ours drafting the ``known`` texts (by default the right ones)."""
    expected = ends(llms[0], asked, wanted)
    with oracle(known or [p + tokens for p, (tokens, *_) in zip(asked, expected, strict=False)]):
        assert ends(llms[1], asked, wanted) == expected
    return expected


def test_stop_strings_at_every_offset(llms):
    prompt = printable(51)
    ((tokens, text, *_),) = ends(llms[0], [prompt], params(allowed_token_ids=PRINTABLE, ignore_eos=True))
    assert len(text) == TOKENS
    wanted = [
        params(
            allowed_token_ids=PRINTABLE,
            ignore_eos=True,
            stop=["never", text[at : at + 2]],
            include_stop_str_in_output=bool(at % 2),
            logprobs=0 if at % 3 == 0 else None,
            min_tokens=at if at > 5 else 0,
        )
        for at in OFFSETS
    ]
    expected = same_ends(llms, [prompt] * len(wanted), wanted, [prompt + tokens])
    assert {reason for _, _, reason, *_ in expected} == {"stop"}
    assert len({len(tokens) for tokens, *_ in expected}) > 3
    assert accepted_length(llms[1]) > 2


def test_token_stops_and_lengths_at_every_offset(llms):
    prompt = printable(52)
    ((tokens, *_),) = ends(llms[0], [prompt], params(ignore_eos=True))
    wanted = [params(ignore_eos=True, max_tokens=at) for at in OFFSETS]
    wanted += [params(stop_token_ids=[tokens[at]], include_stop_str_in_output=bool(at % 2)) for at in OFFSETS]
    # A stop token may not appear before min_tokens, which changes the text after it: the draft is then wrong.
    wanted += [params(stop_token_ids=[tokens[at]], min_tokens=at + 2) for at in (1, 4)]
    expected = same_ends(llms, [prompt] * len(wanted), wanted, [prompt + tokens])
    assert {reason for _, _, reason, *_ in expected} == {"stop", "length"}
    assert [len(t) for t, *_ in expected[: len(OFFSETS)]] == list(OFFSETS)


def test_eos_inside_a_path(llms):
    """EOS is made likely, so that it is drafted, accepted, ignored or held back."""
    asked = prompts(8, seed=53)
    likely = {EOS: 3.0}
    free = params(ignore_eos=True, logit_bias=likely)
    answers = [tokens for tokens, *_ in ends(llms[0], asked, free)]
    assert sum(EOS in tokens[1:] for tokens in answers) > 2
    wanted = [params(logit_bias=likely, ignore_eos=i == 0, min_tokens=[0, 0, 3, 6][i % 4]) for i in range(8)]
    known = [p + tokens for p, tokens in zip(asked, answers, strict=True)]
    expected = same_ends(llms, asked, wanted, known)
    stopped = [tokens for tokens, _, reason, *_ in expected if reason == "stop"]
    assert len(stopped) > 2
    assert all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens in stopped)


def test_min_tokens_with_eos_always_first(llms):
    """EOS wins everywhere it is allowed: the text ends exactly one token after min_tokens."""
    asked = prompts(4, seed=54)
    wanted = [params(logit_bias={EOS: 100.0}, min_tokens=least) for least in (0, 1, 5, 7)]
    expected = same_ends(llms, asked, wanted)
    assert [len(tokens) for tokens, *_ in expected] == [1, 2, 6, 8]


def test_repetition_detection_and_stop_strings_with_choices(llms):
    """Repetition is checked token by token; n choices of one request stop each for itself."""
    asked = prompts(2, seed=55)
    found = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    wanted = [
        params(logit_bias={65: 100.0}, repetition_detection=found),
        params(
            temperature=1.0, seed=5, n=3, allowed_token_ids=PRINTABLE[:6], stop=["!", '"'], ignore_eos=True
        ),
    ]
    expected = same_ends(llms, asked, wanted, [asked[0] + [65] * TOKENS])
    assert expected[0][2:4] == ("repetition", "repetition_detected")
    assert len(expected[0][0]) == 3


def deltas(llm, prompt, wanted):
    """Text and tokens of a request that is streamed in deltas, joined."""
    engine = llm.llm_engine
    engine.add_request("streamed", {"prompt_token_ids": prompt}, wanted)
    text, tokens, reason = "", [], None
    while engine.has_unfinished_requests():
        for output in engine.step():
            (choice,) = output.outputs
            text, tokens, reason = text + choice.text, [*tokens, *choice.token_ids], choice.finish_reason
    return text, tokens, reason


def test_how_text_is_handed_over(llms):
    """Detokenizing, special tokens, streaming and the prefix cache's switch leave tokens as they are."""
    prompt = printable(56)
    special = {"ignore_eos": True, "logit_bias": {EOS: 3.0, 257: 3.0}}
    wanted = [
        params(**special),
        params(detokenize=False, **special),
        params(skip_special_tokens=False, **special),
        params(skip_special_tokens=False, spaces_between_special_tokens=False, **special),
        params(skip_reading_prefix_cache=True, **special),
    ]
    expected = same_ends(llms, [prompt] * len(wanted), wanted)
    assert all(tokens == expected[0][0] for tokens, *_ in expected)
    assert expected[1][1] == "" and "<|im_" in expected[2][1]
    wanted = params(stop=["~~"], output_kind=RequestOutputKind.DELTA, stream_interval=3, **special)
    with oracle([prompt + expected[0][0]]):
        streamed = [deltas(llm, prompt, wanted.clone()) for llm in llms]
    assert streamed[1] == streamed[0]
    assert streamed[0][1] == expected[0][0]
