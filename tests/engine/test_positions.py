"""Positions up to the end of the context: every one looked up has its row in the rotary table."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from driving import drive, runner
from engines import GPU, SETTINGS, accepted_length, engine, generate, greedy, prompts, tree
from tiny_models import make_drafter
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_ddtree.engine import rotary
from vllm_ddtree.engine.proposer import TreeSpeculator

LENGTH, SHORT = 320, 128
PROMPT = prompts(1, seed=3)[0][:20]
# Rotary scaling whose table may simply be made longer: each row depends on its position alone.
STRETCHED = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "ntk": {"factor": 2.0},
    "proportional": {},
}
FIXED = {
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
}


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, **(STRETCHED | FIXED)[kind], **more}


def tables(llm):
    """(model, rows) of every rotary table of an engine."""
    work = runner(llm)
    return [
        (name, len(module.cos_sin_cache))
        for name, model in (("target", work.model), ("drafter", work.speculator.model))
        for module in model.modules()
        if hasattr(module, "cos_sin_cache")
    ]


def whole_context(pair, speculative):
    """One request to the very end: its answer, the drafts of every step, the accepted length, positions."""
    drafted, seen = [], []
    speculator = TreeSpeculator if speculative["method"] == "ddtree" else DFlashSpeculator
    propose, rotate = speculator.propose, ops.rotary_embedding

    def proposing(self, *args, **kwargs):
        nodes = propose(self, *args, **kwargs)
        drafted.append(nodes[0].tolist())
        return nodes

    def rotating(positions, query, key, head_size, table, *args):
        seen.append(int(positions.max()))
        assert seen[-1] < len(table), f"position {seen[-1]} of a table of {len(table)} rows"
        return rotate(positions, query, key, head_size, table, *args)

    watched = mock.patch.object(ops, "rotary_embedding", rotating)
    with watched, engine(pair, speculative, max_model_len=LENGTH) as llm:
        assert all(rows >= LENGTH for _, rows in tables(llm)) and len(tables(llm)) >= 2
        with mock.patch.object(speculator, "propose", proposing):
            output = drive(llm, {"one": (PROMPT, greedy(LENGTH))})["one"]
        return list(output.outputs[0].token_ids), drafted, accepted_length(llm), seen


@pytest.mark.skipif(GPU, reason="watches the function that rotates on a CPU")
def test_a_drafter_trained_on_a_shorter_context_drafts_as_well_beyond(tiny, tmp_path):
    """Same text as without speculation, and draft for draft that of the same weights with a long table."""
    short = make_drafter(tmp_path / "short", max_position_embeddings=SHORT)
    with engine(tiny, max_model_len=LENGTH) as plain:
        (want,) = generate(plain, [PROMPT], greedy(LENGTH))
    assert len(want) == LENGTH - len(PROMPT)
    text, *found, seen = whole_context((tiny[0], str(short)), tree(24))
    assert text == want
    assert max(seen) == LENGTH - 1  # drafted rows past the end take the last position
    text, *long, _ = whole_context(tiny, tree(24))
    assert text == want
    assert found == long and long[1] > 1


def settings(**changes):
    return {key: value for key, value in SETTINGS.items() if key != "seed"} | changes


@pytest.mark.parametrize("kind", FIXED)
def test_a_table_that_can_not_be_stretched_is_refused(tiny, tmp_path, kind):
    drafter = make_drafter(tmp_path / "d", max_position_embeddings=SHORT, rope_parameters=rope(kind))
    args = {"model": tiny[0], "speculative_config": tree(16, model=str(drafter))}
    with pytest.raises(ValueError) as caught:
        EngineArgs(**args, **settings(max_model_len=LENGTH)).create_engine_config()
    assert f"rotary scaling {kind!r} reaches {SHORT} positions" in str(caught.value)
    assert f"max_model_len is {LENGTH}" in str(caught.value)
    config = EngineArgs(**args, **settings(max_model_len=SHORT)).create_engine_config()
    assert config.model_config.max_model_len == SHORT


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_table_that_can_be_stretched_is(tiny, tmp_path, kind):
    drafter = make_drafter(tmp_path / "d", max_position_embeddings=SHORT, rope_parameters=rope(kind))
    args = settings(max_model_len=LENGTH)
    config = EngineArgs(
        model=tiny[0], speculative_config=tree(16, model=str(drafter)), **args
    ).create_engine_config()
    assert config.model_config.max_model_len == LENGTH
    assert config.speculative_config.draft_model_config.hf_config.max_position_embeddings == LENGTH


@pytest.mark.parametrize("kind", [*STRETCHED, *FIXED])
def test_what_is_known_of_vllms_tables(tiny, kind):
    """The rule against the tables themselves: how far they reach, and whether a longer one begins alike."""
    parameters = rope(kind)
    config = SimpleNamespace(max_position_embeddings=SHORT, rope_parameters=parameters)
    with set_current_vllm_config(EngineArgs(model=tiny[0], **settings()).create_engine_config()):
        short = get_rope(32, SHORT, rope_parameters=parameters).cos_sin_cache
        long = get_rope(32, LENGTH, rope_parameters=parameters).cos_sin_cache
    reach = rotary.reach(config)
    if kind in STRETCHED:
        assert reach is None
        assert len(long) >= LENGTH and torch.equal(long[: len(short)], short)
    else:
        assert reach == len(short)
    nested = {"full_attention": parameters, "sliding_attention": rope("default")}
    assert rotary.reach(SimpleNamespace(max_position_embeddings=SHORT, rope_parameters=nested)) == reach
    assert rotary.reach(SimpleNamespace(max_position_embeddings=SHORT)) is None
