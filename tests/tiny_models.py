"""Tiny random targets and DFlash drafters, made on the spot: real files for the real engine.

    python tests/tiny_models.py DIR

Weights come from a fixed seed. Untrained drafters accept little, but over a vocabulary this small a tree
of a few dozen nodes is right often enough, and mostly through siblings that are not the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 3, 4, 2, 32, 128, 272
BLOCK, MASK = 8, 258
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|mask|>", "<|im_end|>")
# Marks of thoughts and tool calls, as Qwen3 has them: ids 260..263 of a target made with them.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_target(folder: Path, kind: str = "llama", words: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a target (kind llama, qwen2 or qwen3) with tokenizer, whose ids from 260 are ``words``."""
    # Qwen2 has no head_dim of its own, and vLLM's CPU attention takes multiples of 32 only.
    heads, kv_heads = (HIDDEN // HEAD_DIM, 1) if kind == "qwen2" else (HEADS, KV_HEADS)
    config = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind] + "ForCausalLM"],
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 259,
        "dtype": "float32",
    } | changes
    noise = torch.Generator().manual_seed(1)
    vocab = config["vocab_size"]
    weights = {"model.embed_tokens.weight": _matrix(noise, vocab, HIDDEN, scale=1.0)}
    weights["lm_head.weight"] = _matrix(noise, vocab, HIDDEN, scale=0.3)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(config["num_hidden_layers"]):
        weights |= _layer(noise, f"model.layers.{layer}.", heads, kv_heads, kind == "qwen2", kind == "qwen3")
    _write(folder, config, weights)
    _tokenizer(words).save_pretrained(folder)
    return folder


def make_drafter(folder: Path, **changes: Any) -> Path:
    """Write a DFlash drafter that fits every target of :func:`make_target`; return its folder."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": "float32",
    } | changes
    noise = torch.Generator().manual_seed(2)
    taps = len(config["dflash_config"]["target_layer_ids"]) if config.get("dflash_config") else 1
    weights = {
        "fc.weight": _matrix(noise, HIDDEN, HIDDEN * taps),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(config["num_hidden_layers"]):
        weights |= _layer(noise, f"layers.{layer}.", HEADS, KV_HEADS, bias=False, norms=True)
    _write(folder, config, weights)
    return folder


def make_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter (PEFT's layout) for a llama target of :func:`make_target`; return its folder."""
    modules = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    places = {f"model.layers.{i}.{name}": size for i in range(LAYERS) for name, size in modules.items()}
    places["lm_head"] = (VOCAB, HIDDEN)
    noise = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (out, into) in places.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = _matrix(noise, rank, into)
        weights[f"base_model.model.{name}.lora_B.weight"] = _matrix(noise, out, rank)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-1] for name in places}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _matrix(noise: torch.Generator, rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
    return torch.randn(rows, columns, generator=noise) * (columns**-0.5 if scale is None else scale)


def _layer(
    noise: torch.Generator, prefix: str, heads: int, kv_heads: int, bias: bool, norms: bool
) -> dict[str, torch.Tensor]:
    sizes = {
        "self_attn.q_proj": (heads * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    weights = {f"{prefix}{name}.weight": _matrix(noise, *size) for name, size in sizes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    if norms:
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{name}.weight"] = torch.ones(HEAD_DIM)
    if bias:
        for name in ("q", "k", "v"):
            size = sizes[f"self_attn.{name}_proj"][0]
            weights[f"{prefix}self_attn.{name}_proj.bias"] = 0.3 * torch.randn(size, generator=noise)
    return weights


def _tokenizer(words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Bytes plus four special tokens: every text round-trips, ids 0..259; then whole words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[0], eos_token=SPECIALS[3], pad_token=SPECIALS[0]
    )
    fast.chat_template = TEMPLATE
    return fast


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(make_target(root / "target"), make_drafter(root / "drafter"))
