"""DFlash drafting and tree acceptance in plain PyTorch, for one text at a time: what the engine must match.

Written from the papers (arXiv 2602.06036, 2604.12989), without vLLM. Greedy only: the accepted path of a
tree is then the longest one along the target's own continuation.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vllm_ddtree import reference


class PlainDrafter:
    """A DFlash drafter in float32; shares the target's embedding and head."""

    def __init__(self, folder: str, embedding: Tensor, head: Tensor) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.weights = {k: v.float() for k, v in load_file(Path(folder) / "model.safetensors").items()}
        self.embedding, self.head = embedding, head
        self.block = self.config["block_size"]
        self.layer_ids = self.config["dflash_config"]["target_layer_ids"]

    def log_probs(self, hidden: list[Tensor], anchor: int) -> Tensor:
        """Log-probabilities [block - 1, V] of the tokens after ``anchor``.

        Args:
            hidden: the target's hidden states after each of ``layer_ids``, [context, hidden] each.
            anchor: the last emitted token, at position ``context``.
        """
        w, eps = self.weights, self.config["rms_norm_eps"]
        features = _norm(torch.cat(hidden, -1) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        mask = self.config["dflash_config"]["mask_token_id"]
        x = self.embedding[torch.tensor([anchor] + [mask] * (self.block - 1))]
        positions = torch.arange(len(features) + self.block)
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attend(f"layers.{layer}.", x, features, positions)
            y = _norm(x, w[f"layers.{layer}.post_attention_layernorm.weight"], eps)
            gate, up, down = (w[f"layers.{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return torch.log_softmax(_norm(x, w["norm.weight"], eps)[1:] @ self.head.T, -1)

    def _attend(self, prefix: str, x: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        w, size, eps = self.weights, self.config["head_dim"], self.config["rms_norm_eps"]
        y = _norm(x, w[f"{prefix}input_layernorm.weight"], eps)
        both = torch.cat((features, y))
        q = (y @ w[f"{prefix}self_attn.q_proj.weight"].T).unflatten(-1, (-1, size))
        k, v = ((both @ w[f"{prefix}self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, size)) for n in "kv")
        q, k = (_norm(t, w[f"{prefix}self_attn.{n}_norm.weight"], eps) for t, n in ((q, "q"), (k, "k")))
        theta = self.config["rope_theta"]
        q, k = _rope(q, positions[-len(q) :], theta), _rope(k, positions, theta)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1) @ w[f"{prefix}self_attn.o_proj.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def greedy_text(model: torch.nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """The target's greedy continuation of ``prompt``."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def accepted(
    model: torch.nn.Module,
    drafter: PlainDrafter,
    prompt: list[int],
    answer: list[int],
    tokens: int,
    nodes: int,
) -> tuple[int, int]:
    """(steps, accepted drafts) of emitting at least ``tokens`` tokens of ``answer``.

    Args:
        answer: the target's greedy continuation, at least a block longer than ``tokens``.
        nodes: tree budget; 0 means the chain of the drafter's first choices.
    """
    with torch.inference_mode():
        states = model(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states
        hidden = [states[i + 1][0] for i in drafter.layer_ids]
        emitted, steps, total = 1, 0, 0  # the prompt's own step emits the first token
        while emitted < tokens:
            position = len(prompt) + emitted - 1
            logps = drafter.log_probs([h[:position] for h in hidden], answer[emitted - 1])
            length = _longest(logps, answer[emitted : emitted + len(logps)], nodes)
            steps, total, emitted = steps + 1, total + length, emitted + length + 1
    return steps, total


def _longest(logps: Tensor, truth: list[int], nodes: int) -> int:
    if nodes == 0:
        guesses = logps.argmax(-1).tolist()
        return next((i for i, (g, t) in enumerate(zip(guesses, truth, strict=False)) if g != t), len(truth))
    top, ids = logps.topk(nodes, -1)
    tokens, parents, depths, _, count = reference.build(top[None], ids[None], torch.tensor([nodes]), nodes)
    node = 0
    for depth, wanted in enumerate(truth):
        children = (parents[0] == node) & (tokens[0] == wanted) & (torch.arange(len(tokens[0])) <= count[0])
        if not children.any():
            return depth
        node = int(children.nonzero()[0])
    return int(depths[0, node])
