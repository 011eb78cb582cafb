"""Weights of the target replaced in a running engine: the text is the new target's, the drafter stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from driving import drive, runner
from engines import engine, generate, greedy, prompts, tree
from safetensors.torch import load_file, save_file

TOKENS = 10


def another_target(folder: Path, target: str) -> str:
    """A target like ``target`` with other weights."""
    shutil.copytree(target, folder)
    noise = torch.Generator().manual_seed(9)
    weights = {
        name: torch.randn(weight.shape, generator=noise) * weight.std() if weight.dim() > 1 else weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_the_text_is_that_of_the_new_weights(tiny, tmp_path):
    asked, other = prompts(3, seed=5), another_target(tmp_path / "other", tiny[0])
    with engine((other, tiny[1])) as llm:
        expected = generate(llm, asked, greedy(TOKENS))
    with engine(tiny, tree(24), async_scheduling=False) as llm:
        drafter, target = runner(llm).speculator.model, runner(llm).get_model()
        own = {n: w for n, w in drafter.named_parameters() if "embed_tokens" not in n and "lm_head" not in n}
        before = {name: weight.detach().clone() for name, weight in own.items()}

        def text_and_steps(**where):
            if where:
                llm.collective_rpc("reload_weights", kwargs=where)
                assert llm.reset_prefix_cache()
            steps = []
            requests = {str(i): (prompt, greedy(TOKENS)) for i, prompt in enumerate(asked)}
            outputs = drive(llm, requests, steps.append)
            return [list(outputs[name].outputs[0].token_ids) for name in sorted(outputs)], len(steps)

        first = text_and_steps()
        assert text_and_steps(weights_path=other)[0] == expected != first[0]
        assert drafter.model.embed_tokens is target.model.embed_tokens and drafter.lm_head is target.lm_head
        for name, weight in own.items():
            assert torch.equal(weight, before[name]), name
        # Back again, and as many steps as at first: the drafter drafts as it did.
        assert text_and_steps(weights_path=tiny[0]) == first
