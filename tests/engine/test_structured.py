"""Structured output (verified as a chain) beside free requests (trees) in one batch."""

from __future__ import annotations

import json
import re

import pytest
from engines import engine, greedy, tree
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
REGEX = "[a-f]{4}-[0-9]{3}"


def requests():
    def structured(**kind):
        return SamplingParams(
            temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(**kind)
        )

    return [
        structured(regex=REGEX),
        greedy(10),
        structured(choice=["positive", "negative"]),
        greedy(7),
        structured(json=SCHEMA),
    ]


def texts(llm):
    asked = ["A code:", "Say something.", "Is it good?", "More words here.", "Give me a number as JSON:"]
    return [output.outputs[0].text for output in llm.generate(asked, requests(), use_tqdm=False)]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_valid_and_equal_to_no_speculation(tiny, backend):
    settings = {"structured_outputs_config": {"backend": backend}}
    with engine(tiny, **settings) as llm:
        plain = texts(llm)
    with engine(tiny, tree(20), **settings) as llm:
        ours = texts(llm)
    assert ours == plain
    assert re.fullmatch(REGEX, ours[0])
    assert ours[2] in ("positive", "negative")
    if ours[4].endswith("}"):  # cut off by max_tokens otherwise
        assert isinstance(json.loads(ours[4])["a"], int)
