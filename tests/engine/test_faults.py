"""Faults on purpose: each ends in an error that says why, or in the right text; none in a wrong one."""

from __future__ import annotations

import gc
import logging
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from driving import drive, free_blocks, runner
from engines import SETTINGS, accepted_length, engine, generate, greedy, prompts, tree
from oracle import oracle
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from vllm_ddtree import ops, step
from vllm_ddtree.engine.scorer import TreeScorer

TOKENS = 8
SMALL = {"num_gpu_blocks_override": 40}


@pytest.fixture(scope="module")
def case(tiny):
    asked = prompts(3, seed=51)
    with engine(tiny, **SMALL) as llm:
        return asked, generate(llm, asked, greedy(TOKENS))


@pytest.fixture(scope="module")
def ours(tiny):
    with engine(tiny, tree(20), **SMALL) as llm:
        yield llm


def known(case):
    return [prompt + answer for prompt, answer in zip(*case, strict=True)]


def test_without_kernels_the_text_is_the_same(case, ours, monkeypatch):
    monkeypatch.setattr(ops, "_DEVICES", {"cpu": False, "cuda": False})
    assert not ops.has_kernels("cpu")
    with oracle(known(case)):
        assert generate(ours, case[0], greedy(TOKENS)) == case[1]


def test_an_extension_that_lacks_an_op_is_not_used():
    """An op of the same name from an older build is there, the rest is not."""
    code = (
        "import logging; logging.basicConfig()\n"
        "import torch\n"
        "old = torch.library.Library('ddtree', 'DEF')\n"
        "old.define('build(Tensor top_logps) -> ()')\n"
        "from vllm_ddtree import ops\n"
        "p, m = torch.tensor([[-1, 0, 1]], dtype=torch.int32), torch.zeros(1, 3, 1, dtype=torch.int32)\n"
        "ops.ancestor_mask(p, torch.tensor([2], dtype=torch.int32), m)\n"
        "print(m.flatten().tolist(), ops.has_kernels('cpu'), ops.kernels_error('cpu'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1, 3, 7] False ")
    assert "lacks retrieve, ancestor_mask" in done.stdout and "another version" in done.stdout
    assert "slower reference path" in done.stderr


POISONS = {
    "every score is no number": lambda logits: logits.fill_(math.nan),
    "a row of no numbers": lambda logits: logits[1::7].fill_(math.nan),
    "one score is no number": lambda logits: logits[:, 5].fill_(math.nan),
    "a row of -inf": lambda logits: logits[::7].fill_(-math.inf),
    "nothing but -inf": lambda logits: logits.fill_(-math.inf),
    "one score is +inf": lambda logits: logits[:, 70].fill_(math.inf),
    "all but one are -inf": lambda logits: logits[:, 1:].fill_(-math.inf),
}


@pytest.mark.parametrize("poison", POISONS)
def test_a_drafter_that_returns_nonsense_only_drafts_less(case, ours, poison):
    drafter = runner(ours).speculator.model
    honest, calls = drafter.compute_logits, []

    def poisoned(hidden):
        logits = honest(hidden).clone()
        POISONS[poison](logits)
        calls.append(logits.shape[0])
        return logits

    with mock.patch.object(drafter, "compute_logits", poisoned):
        assert generate(ours, case[0], greedy(TOKENS)) == case[1]
    assert calls
    unused, total = free_blocks(ours)
    assert unused == total


def poisoned_target(rows_of):
    """A patch that fills the target's logits with NaN at the rows that ``rows_of(tokens, batch)`` names."""
    honest, poisoned = TreeScorer.__call__, []

    def call(self, logits, batch, *args, **kwargs):
        tokens = batch.input_ids[batch.logits_indices[: logits.shape[0]]]
        rows = rows_of(tokens, batch)
        logits[rows] = math.nan
        poisoned.append(int(rows.sum()))
        return honest(self, logits, batch, *args, **kwargs)

    return mock.patch.object(TreeScorer, "__call__", call), poisoned


def test_nan_at_nodes_off_the_path_changes_nothing(case, ours):
    """What the target says at a node counts only once the walk gets there."""
    right = torch.zeros(512, dtype=torch.bool)
    right[torch.tensor([token for text in known(case) for token in text])] = True
    patch, poisoned = poisoned_target(lambda tokens, _batch: ~right.to(tokens.device)[tokens.long()])
    with oracle(known(case)), patch:
        assert generate(ours, case[0], greedy(TOKENS)) == case[1]
    assert sum(poisoned) > 20


def test_nan_on_the_path_stays_in_its_request(case, ours):
    """As without speculation, the request itself gets tokens of no meaning; others must not notice."""

    def first_request(tokens, batch):
        rows = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        index = batch.req_ids.index(next((r for r in batch.req_ids if r.startswith("0-")), batch.req_ids[0]))
        if batch.req_ids[index].startswith("0-"):
            rows[int(batch.cu_num_logits[index]) : int(batch.cu_num_logits[index + 1])] = True
        return rows

    patch, poisoned = poisoned_target(first_request)
    asked, answers = case
    with oracle(known(case)), patch:
        outputs = drive(ours, {str(i): (prompt, greedy(TOKENS)) for i, prompt in enumerate(asked)})
    texts = [list(outputs[str(i)].outputs[0].token_ids) for i in range(3)]
    assert sum(poisoned) > TOKENS
    assert texts[1:] == answers[1:]
    assert len(texts[0]) == TOKENS and all(0 <= token < 272 for token in texts[0])
    assert generate(ours, asked, greedy(TOKENS)) == answers  # nothing poisoned is left in the prefix cache


def test_no_prompt_in_the_log(ours):
    """At the most talkative level, neither prompts nor answers are logged."""
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler, loggers = (
        Keep(),
        [logging.getLogger(name) for name in ("", "vllm", "vllm.ddtree", "vllm_ddtree")],
    )
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.DEBUG)
    try:
        params = [greedy(4), SamplingParams(temperature=0.9, max_tokens=4, repetition_penalty=1.2)]
        outputs = ours.generate(["the secret word is xylophone"] * 2, params, use_tqdm=False)
        logging.getLogger("vllm.ddtree").debug("the handler works")
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)
    assert "the handler works" in records
    ids = str(list(outputs[0].prompt_token_ids))[1:-1]
    assert not [text for text in records if "xylophone" in text or ids in text]


def test_a_silent_drafter_means_one_token_per_step_and_errors_reach_the_caller(tiny, case):
    """No scores, no tree; and no text at all rather than a wrong one."""
    with engine(tiny, tree(20), **SMALL) as llm:
        drafter = runner(llm).speculator.model
        honest = drafter.compute_logits
        silent = mock.patch.object(drafter, "compute_logits", lambda h: honest(h).clone().fill_(math.nan))
        with silent:
            assert generate(llm, case[0], greedy(TOKENS)) == case[1]
        assert accepted_length(llm) == 1.0
        broken = mock.patch.object(
            step, "walk_rows", side_effect=RuntimeError("CUDA error: put here by a test")
        )
        with broken, pytest.raises(RuntimeError, match="put here by a test"):
            generate(llm, case[0], greedy(TOKENS))


def start(target, drafter, **changes):
    """Start an engine that can't start; the text of its error."""
    speculative = tree(20, model=str(drafter))
    with pytest.raises(Exception) as caught:
        LLM(target, speculative_config=speculative, **(SETTINGS | SMALL | changes))
    cleanup_dist_env_and_memory()
    return str(caught.value)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1.mlp" not in k}, folder / "model.safetensors")


def of_another_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"][:, :-64].contiguous()
    save_file(weights, folder / "model.safetensors")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    no_weights(folder)


def junk_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncated, "is broken .*Copy it again"),
        (without_a_layer, "lacks 3 tensors, 'layers.1.mlp.down_proj.weight'"),
        (of_another_shape, "size|shape"),
        (no_weights, r"no \*.safetensors file"),
        (pickled, "would be read from pickles.*convert the weights"),
        (junk_config, "can't be read|not a valid JSON"),
    ],
)
def test_drafter_files_that_are_broken(tiny, tmp_path, spoil, words):
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny[1], drafter)
    spoil(drafter)
    text = start(tiny[0], drafter)
    assert re.search(words, text), text


def test_a_pickled_target_is_refused(tiny, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny[0], target)
    pickled(target)
    assert "the target" in start(str(target), tiny[1])
    assert "load_format is 'pt'" in start(tiny[0], tiny[1], load_format="pt")


def test_no_unpickling_while_an_engine_starts(tiny):
    """Weights of both models come through safetensors: torch.load is never reached."""
    with (
        mock.patch.object(torch, "load", side_effect=AssertionError("torch.load was called")),
        engine(tiny, tree(7), **SMALL) as llm,
    ):
        assert llm.llm_engine.vllm_config.speculative_config.draft_load_config.load_format == "safetensors"


@pytest.mark.parametrize(
    ("blocks", "words"), [(1, "No available memory"), (4, "To serve at least one request")]
)
def test_too_little_memory_for_the_cache(tiny, blocks, words):
    assert words in start(tiny[0], tiny[1], num_gpu_blocks_override=blocks, block_size=32)


def kept_by(llm):
    """What a shut-down engine must let go of: storages by name. Tensors alone would not do, since a view of a
    cache keeps all of it."""
    work = runner(llm)
    layers = work.compilation_config.static_forward_context
    tensors = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    for name, owner in (("store", work.tree_store), ("step", work.tree_step), ("drafter", work.speculator)):
        tensors |= {f"{name}.{k}": v for k, v in vars(owner).items() if isinstance(v, torch.Tensor)}
    tensors |= {f"weights.{name}": weight for name, weight in work.speculator.model.named_parameters()}
    return {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in tensors.items()}


def test_an_engine_that_was_shut_down_keeps_no_memory(tiny):
    """The engine object may outlive its shutdown, as in a process that starts one after the other; vLLM
    itself gives cache and models back then."""
    with engine(tiny, tree(20, ddtree_deriver="residual"), **SMALL) as llm:
        generate(llm, prompts(2), greedy(6))
        memory = kept_by(llm)
        assert len(memory) > 30 and "store.draft_probs" in memory
    gc.collect()
    left = [name for name, storage in memory.items() if not storage.expired()]
    assert left == []
    del llm  # until here it was alive
