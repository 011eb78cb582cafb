"""Configuration-only model folders for benchmarks with dummy weights: real shapes, no download."""

from __future__ import annotations

import json
from pathlib import Path

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


def write_configs(folder: Path) -> tuple[Path, Path]:
    """Write both folders; return (target, drafter). Load them with ``load_format="dummy"``."""
    paths = []
    for name, config in (("qwen3-8b", QWEN3_8B), ("qwen3-8b-dflash", QWEN3_8B_DFLASH)):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        paths.append(path)
    return paths[0], paths[1]
