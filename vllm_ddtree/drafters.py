"""Public DFlash drafters by target, so that ``{"method": "ddtree"}`` alone works.

A convenience, never a gate: any drafter can be named with ``"model"``. ``tested`` is true only for
pairs this project has run in a real engine. Ids as listed in public READMEs (read 2026-11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Drafter:
    """One row: a target's model id, its drafter's id, and whether we ran the pair."""

    target: str
    drafter: str
    tested: bool = False


# Targets with sliding-window, hybrid (GDN) or MLA attention are left out: ddtree refuses them for now.
DRAFTERS: tuple[Drafter, ...] = (
    Drafter("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    Drafter("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    Drafter("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    Drafter("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    Drafter("MiniMaxAI/MiniMax-M2.5", "z-lab/MiniMax-M2.5-DFlash"),
    Drafter("MiniMaxAI/MiniMax-M2.7", "z-lab/MiniMax-M2.7-DFlash"),
)


def find_drafter(target: str) -> Drafter | None:
    """Return the row for a target's model id or local folder of that name, or None.

    Args:
        target: the ``model`` given to vLLM, or the cache folder that vLLM makes of it where it works
            offline; a local path matches by its name.
    """
    name = _model_name(target).lower()
    return next((row for row in DRAFTERS if row.target.split("/")[-1].lower() == name), None)


def _model_name(target: str) -> str:
    """The name in an id or a path, also that of a folder in a cache of Hugging Face or ModelScope."""
    *_, folder, kind, name = ["", "", *target.rstrip("/").split("/")]
    if kind == "snapshots" and folder.startswith("models--"):  # models--ORGANISATION--NAME/snapshots/HASH
        name = folder.split("--")[-1]
    return name.replace("___", ".")  # ModelScope's folders have no dot in their names


def block_size(config: dict[str, Any]) -> Any:
    """What a DFlash drafter's config.json, or the config made of it, says of its block; None if nothing.

    Public drafters have it at the top or in ``dflash_config``; vLLM itself reads neither.
    """
    outer = config.get("block_size")
    return (config.get("dflash_config") or {}).get("block_size") if outer is None else outer
