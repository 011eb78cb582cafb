"""vLLM's OpenAI server, whose drafter knows texts while the file that $DDTREE_TEXTS names exists (oracle.py).

``servers.server`` runs this file, and the processes that the server spawns import it, the worker too.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from oracle import oracle

from vllm_ddtree.engine.proposer import TreeSpeculator

TEXTS = Path(os.environ["DDTREE_TEXTS"])
_honest = TreeSpeculator._build


def _build(self: Any, num_reqs: int, logits: torch.Tensor) -> None:
    with mock.patch.object(TreeSpeculator, "_build", _honest):
        try:
            texts = json.loads(TEXTS.read_text())
        except FileNotFoundError:
            return self._build(num_reqs, logits)
        with oracle(texts):
            return self._build(num_reqs, logits)


TreeSpeculator._build = _build

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
