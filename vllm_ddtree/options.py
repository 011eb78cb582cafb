"""The user's options: flat keys inside vLLM's ``--speculative-config``.

Owns the names, defaults, ranges and error texts of every key that ddtree reads. It must not know
vLLM: the engine folder passes a plain dict in and gets a validated object out.
Invariant: an unknown ``ddtree_*`` key is an error that names the nearest valid key, never ignored.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

METHOD = "ddtree"
PREFIX = "ddtree_"
TIERS = "num_speculative_tokens_per_batch_size"
# Ringel & Romano (arXiv 2604.12989), table of budgets: 64 nodes hold 93% of the speed-up of the best
# budget at batch 1, and JetSpec's table (arXiv 2606.18394) has it fastest at 8 requests.
DEFAULT_NODES = 64
# (first batch size, last, nodes), where the user names no number: of 8, 16, 32 and 64 what gives most tokens
# per second of an 8B target's measured steps on an H200 at the paper's accepted lengths, or within 2% of it
# (docs/gpu-results.md, "Which number of nodes"). From 9 requests on arithmetic binds the GPU; 8 nodes are
# fewer rows than the chain has, and the least that a tree is good for.
DEFAULT_TIERS = ((1, 1, DEFAULT_NODES), (2, 4, 32), (5, 8, 16), (9, 64, 8))
DEFAULT_UNSCHEDULED = 16
# The attention kernels hold one bit row per node; 512 is the largest width they are tested at.
MAX_NODES = 512


class TreeOptions(BaseModel):
    """Validated options of one engine.

    Attributes:
        num_nodes: most nodes of a draft tree, root not counted (``num_speculative_tokens``), 1..512.
        max_depth: deepest node allowed; ``None`` means the drafter's horizon (block size - 1).
        attention_backend: tree attention on the GPU, ``auto`` picks the measured default.
        deriver: verification rule: ``draw`` (the target's own draws, the text of the run without
            speculation), ``coins`` (siblings tried in order; target-distributed, with noise of its own)
            or ``residual`` (children drawn from the drafter, for temperatures from 1; likewise).
        grammar: how structured requests are verified: ``tree``, or ``chain``, which costs the host less.
        synthetic_acceptance_length: benchmark only: impose this mean accepted length (bonus counted)
            instead of walking; the text is then meaningless.
        top_k: candidates kept per depth; ``None`` means min(num_nodes, vocabulary), which is exact.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_nodes: int = Field(DEFAULT_NODES, gt=0, le=MAX_NODES)
    max_depth: int | None = Field(None, gt=0)
    attention_backend: Literal["auto", "flash", "fused"] = "auto"
    deriver: Literal["draw", "coins", "residual"] = "draw"
    grammar: Literal["tree", "chain"] = "tree"
    top_k: int | None = Field(None, gt=0)
    synthetic_acceptance_length: float | None = Field(None, ge=1.0)


# key in the speculative config -> field of TreeOptions
KEYS: dict[str, str] = {
    "num_speculative_tokens": "num_nodes",
    "ddtree_max_depth": "max_depth",
    "ddtree_attention_backend": "attention_backend",
    "ddtree_deriver": "deriver",
    "ddtree_grammar": "grammar",
    "ddtree_top_k": "top_k",
    "ddtree_synthetic_acceptance_length": "synthetic_acceptance_length",
}


def plain_keys(speculative_config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a speculative config with ``-`` in its keys read as ``_``."""
    return {key.replace("-", "_"): value for key, value in speculative_config.items()}


def split_options(
    speculative_config: dict[str, Any], scheduled: bool = True
) -> tuple[TreeOptions, dict[str, Any]]:
    """Separate ddtree's keys from vLLM's.

    Args:
        speculative_config: the dict given to ``--speculative-config``; ``-`` in keys reads as ``_``.
        scheduled: whether the engine can draft by batch size; otherwise the default is one small number.

    Returns:
        The validated options and the remaining keys (``model`` among them) for vLLM's own config. Who gives
        no number of nodes gets fewer as requests grow (``num_speculative_tokens_per_batch_size``).

    Raises:
        ValueError: unknown ``ddtree_*`` key or a value out of range; the text names the key, what was
            found, what is required and, for a misspelt key, the nearest valid one.
    """
    rest = plain_keys(speculative_config)
    unknown = [key for key in rest if key.startswith(PREFIX) and key not in KEYS]
    if unknown:
        raise ValueError("; ".join(_unknown_key(key) for key in unknown))
    fields = {field: rest.pop(key) for key, field in KEYS.items() if key in rest}
    rest.pop("method", None)
    if fields.get("num_nodes") is None:
        if scheduled or rest.get(TIERS):
            tiers = rest.setdefault(TIERS, [list(tier) for tier in DEFAULT_TIERS])
            fields["num_nodes"] = _most_nodes(tiers)
        else:
            fields["num_nodes"] = DEFAULT_UNSCHEDULED
    try:
        return TreeOptions(**{k: v for k, v in fields.items() if v is not None}), rest
    except ValidationError as error:
        names = {field: key for key, field in KEYS.items()}
        lines = [
            f"{names[str(item['loc'][0])]} = {item['input']!r}: {item['msg']}" for item in error.errors()
        ]
        raise ValueError("; ".join(lines)) from None


def _most_nodes(tiers: Any) -> int | None:
    """The largest number of nodes in a schedule; None where it has no form, which vLLM then says."""
    try:
        return max(int(nodes) for _, _, nodes in tiers) or None
    except (TypeError, ValueError, OverflowError):
        return None


def _unknown_key(key: str) -> str:
    valid = [name for name in KEYS if name.startswith(PREFIX)]
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown key {key!r} in the speculative config.{hint} Valid keys: {', '.join(valid)}."
