"""Configuration-only model folders for benchmarks with dummy weights: real shapes, no download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# https://huggingface.co/Qwen/Qwen3-8B config.json and z-lab/Qwen3-8B-DFlash-b16 (5 layers, block 16).
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_8B_DFLASH = {
    **QWEN3_8B,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


# SmolLM2-135M-Instruct's config.json; its step on an H200 is bound by the host. The drafter's is in models/.
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
_SMOLLM2_DFLASH = (
    Path(__file__).resolve().parents[1] / "models" / "smollm2-135m-instruct-dflash" / "config.json"
)


@dataclass(frozen=True)
class Shape:
    """A pair without weights, the accepted lengths to impose on it, and the cache that each engine gets."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    lengths: tuple[float, float]
    """Chain, tree of 64 nodes."""
    kv_gib: float


SHAPES = {
    # Published for this pair: arXiv 2604.12989, MATH-500, temperature 0.
    "8b": Shape(QWEN3_8B, QWEN3_8B_DFLASH, (7.79, 9.75), 10.0),
    # About what the real pair accepts of chats at temperature 0 (docs/gpu-results.md).
    "135m": Shape(SMOLLM2_135M, json.loads(_SMOLLM2_DFLASH.read_text()), (1.94, 2.6), 2.0),
}


def write_configs(folder: Path, shape: str) -> tuple[Path, Path]:
    """Write both folders; return (target, drafter). Load them with ``load_format="dummy"``."""
    paths = []
    for name, config in (("target", SHAPES[shape].target), ("drafter", SHAPES[shape].drafter)):
        path = folder / f"{shape}-{name}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        paths.append(path)
    return paths[0], paths[1]
