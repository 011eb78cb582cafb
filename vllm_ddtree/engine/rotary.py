"""How far a drafter's rotary table reaches, and making it reach as far as the target's context.

vLLM sizes the table by the drafter's own max_position_embeddings and looks positions up to max_model_len
in it, past its end if need be: 0.32 makes the table longer for EAGLE only, 0.33 for DFlash too, but lowers
max_model_len where it can't. Invariant: a table is made longer only where no other row of it changes.
"""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.config import iter_rope_parameters

# Tables whose rows depend on their position alone, sized by max_position_embeddings (vLLM 0.33's list, too).
_STRETCHED = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
# Tables of original_max_position_embeddings * factor rows, whatever max_position_embeddings says.
_BY_FACTOR = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def stretch(config: Any, length: int) -> str | None:
    """Make a drafter's config cover positions below ``length``, or say in words why it can't be done."""
    limit = reach(config)
    if limit is None:
        config.max_position_embeddings = max(getattr(config, "max_position_embeddings", None) or 0, length)
        return None
    if limit >= length:
        return None
    kinds = sorted({kind for kind in map(_kind, iter_rope_parameters(config)) if kind not in _STRETCHED})
    return (
        f"the drafter's rotary scaling {', '.join(map(repr, kinds))} reaches {limit} positions, but "
        f"max_model_len is {length}: later positions would be read from memory behind its table, and a "
        "longer table of this scaling is not the one the drafter learnt. "
        f"Set max_model_len to {limit} or less."
    )


def reach(config: Any) -> int | None:
    """Rows of the rotary table that a drafter's config gives, or None where it may have any number."""
    limits = []
    for parameters in iter_rope_parameters(config):
        kind = _kind(parameters)
        if kind in _BY_FACTOR:
            limits.append(int(parameters["original_max_position_embeddings"] * parameters["factor"]))
        elif kind not in _STRETCHED:
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def _kind(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type", "default"))
