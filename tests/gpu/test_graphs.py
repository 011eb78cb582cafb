"""Features whose shapes change from step to step, under CUDA graphs, with the real pair in float32."""

from __future__ import annotations

import json

import pytest
import torch
from driving import watch_widths
from engines import accepted_length, engine, generate, greedy, tree
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS = 64
PROMPTS = [
    "def fibonacci(n):\n",
    "The capital of France is",
    "Once upon a time there was a small village",
    "import numpy as np\n\ndef mean(values):\n",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fibonacci", "mean", "village"]},
        "language": {"enum": ["python", "english"]},
        "lines": {"enum": [1, 22, 333]},
    },
    "required": ["name", "language", "lines"],
    "additionalProperties": False,
}
CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}
GRAPHS = {
    "enforce_eager": False,
    "max_model_len": 512,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 2**30,
    "structured_outputs_config": CONSTRAINTS,
}


def constrained() -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )


@pytest.fixture(scope="module")
def plain(real):
    """Texts without speculation, and constrained ones beside free ones."""
    with engine(real, **GRAPHS) as llm:
        mixed = [constrained(), greedy(TOKENS), constrained(), constrained()]
        return generate(llm, PROMPTS, greedy(TOKENS)), generate(llm, PROMPTS, mixed)


def test_fewer_nodes_as_requests_grow(real, plain):
    tiers = [(1, 1, 64), (2, 3, 16), (4, 4, 6)]
    with engine(real, tree(64, num_speculative_tokens_per_batch_size=tiers), **GRAPHS) as llm:
        widths = watch_widths(llm)
        for count in (4, 3, 2, 1):
            assert generate(llm, PROMPTS[:count], greedy(TOKENS)) == plain[0][:count]
        assert accepted_length(llm) > 1.5
    assert widths[4] == {6} and 16 in widths[2] & widths[3] and 64 in widths[1], widths


def test_a_grammar_on_the_tree(real, plain):
    mixed = [constrained(), greedy(TOKENS), constrained(), constrained()]
    with engine(real, tree(64), **GRAPHS) as llm:
        texts = generate(llm, PROMPTS, mixed)
        assert accepted_length(llm) > 1.5
        tokenizer = llm.get_tokenizer()
    assert texts == plain[1]
    for text in (texts[0], *texts[2:]):
        answer = json.loads(tokenizer.decode(text, skip_special_tokens=True))
        assert answer.keys() == {"name", "language", "lines"}
