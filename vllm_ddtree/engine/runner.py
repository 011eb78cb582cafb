"""The model runner of a ddtree engine: vLLM's Model Runner V2 with four phases of a step extended.

``prepare_attn`` gives rows their tree positions, ``sample`` verifies and commits, ``add_requests``
decides who gets a chain, ``load_model`` puts proposer and scorer in place. Everything before and after
sees an ordinary linear acceptance. Invariant: when ``sample`` returns, KV rows, hidden rows and
positions of every request are what a chain that accepted the same tokens would have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_ddtree.engine import commit, grammar, graphs
from vllm_ddtree.engine.chain import chain_reason, has_custom_processors
from vllm_ddtree.engine.config import step_sizes, tree_options
from vllm_ddtree.engine.proposer import TreeSpeculator
from vllm_ddtree.engine.scorer import TreeScorer
from vllm_ddtree.engine.state import TreeStep, TreeStore, set_tree_state, tree_state

# A child of vLLM's logger, whose handlers and level the user already chose.
logger = init_logger("vllm.ddtree")


class TreeRunnerMixin:
    """Goes before vLLM's GPUModelRunner (or its CPU subclass) in the bases."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        options = tree_options(vllm_config)
        if options is None:
            raise ValueError("TreeWorker was started without ddtree options; use method=ddtree instead.")
        self.speculator = TreeSpeculator(vllm_config, device, options)
        self.tree_store: TreeStore = self.speculator.store
        self.tree_step = TreeStep(self.max_num_reqs, options.num_nodes, device)
        self.draft_tokens_handler = TreeDraftTokensHandler(device, self.tree_store)
        self._grammar_chains = options.grammar == "chain"
        self._reasoning = bool(vllm_config.structured_outputs_config.reasoning_parser)
        self._slot_mappings: torch.Tensor | None = None
        self._logit_rows: np.ndarray | None = None
        self._aux_hidden_states: list[torch.Tensor] = []
        self._commit: commit.Commit | None = None
        set_tree_state(self.tree_step)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load target and drafter, then put the tree scorer in the rejection sampler's place."""
        # vLLM would allocate a mask row per request and node: 10 GiB for 1,024 requests of 512 nodes.
        rows = step_sizes(self.vllm_config).logits_rows
        with mock.patch.object(model_runner, "StructuredOutputsWorker", _masks_of(rows)):
            super().load_model(*args, **kwargs)
        self.rejection_sampler = TreeScorer(
            self.sampler,
            self.speculative_config,
            self.device,
            self.tree_store,
            tree_options(self.vllm_config),
        )
        self._custom_processors = has_custom_processors(self.sampler)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Set caches and graphs up, less the graphs that no batch of trees can match."""
        result = super().initialize_kv_cache(*args, **kwargs)
        if self.cudagraph_manager is not None:
            graphs.keep_reachable(self.cudagraph_manager, step_sizes(self.vllm_config).nodes)
        return result

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """While memory is profiled, also hold a full verification; vLLM counts one logits row per request."""
        super()._dummy_sampler_run(hidden_states)
        if self.device.type == "cpu":  # its KV cache is what the user says, not what profiling leaves
            return
        rows = step_sizes(self.vllm_config).logits_rows
        logits = self.model.compute_logits(hidden_states[:1].expand(rows, -1).contiguous())
        logger.info(
            "ddtree: a full step has %d rows of logits, %.2f GiB, for which memory is kept free; "
            "max_num_seqs and max_num_batched_tokens set their number.",
            rows,
            logits.nbytes / 2**30,
        )
        self.rejection_sampler.hold(logits)

    def add_requests(self, scheduler_output: Any) -> None:
        """Take new requests in; those with path-dependent sampling parameters are drafted as chains."""
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            reason = chain_reason(
                request.sampling_params, self._custom_processors, self._grammar_chains, self._reasoning
            )
            state = self.req_states.req_id_to_index[request.req_id]
            # Not an assignment, which would copy from the host and wait for the device.
            self.tree_store.is_chain[state].fill_(reason is not None)
            if reason is not None:
                logger.info_once("ddtree: requests with %s are verified as a chain.", reason)

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        """Compute slots from linear positions, then give verification rows their tree positions."""
        set_tree_state(self.tree_step)
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        self._slot_mappings = slot_mappings
        if self.lora_config:
            self._logit_rows = np.diff(input_batch.cu_num_logits_np)
        commit.begin_step(
            self.tree_store, self.tree_step, input_batch, self.req_states.num_computed_tokens.gpu
        )
        return block_tables, slot_mappings

    def _set_active_loras(self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Name the adapter of every logits row; vLLM's V2 runner counts one row per request."""
        rows, self._logit_rows = self._logit_rows, None
        if rows is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, rows).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep the drafter's inputs in sight of :meth:`sample`, then sample, commit and draft."""
        state = self.execute_model_state
        self._aux_hidden_states = [] if state is None else state.aux_hidden_states or []
        return super().sample_tokens(grammar_output)

    def sample(self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any) -> Any:
        """Verify the batch and commit what was accepted."""
        output = super().sample(hidden_states, input_batch, grammar_output)
        if input_batch.num_draft_tokens > 0:
            if self._commit is None:
                self._commit = commit.Commit(self)
            self._commit(
                self.rejection_sampler.accept_index,
                input_batch,
                self._aux_hidden_states,
                self._slot_mappings,
                self.req_states.num_computed_tokens.gpu,
            )
        self._aux_hidden_states = []
        return output

    def shutdown(self) -> None:
        """Let go of views of the caches and of the trees, which vLLM doesn't know; it frees the rest.

        The runner itself may stay reachable as long as the engine is.
        """
        if tree_state() is self.tree_step:
            set_tree_state(None)
        self._commit = self._slot_mappings = self._aux_hidden_states = None
        self.tree_store = self.tree_step = self.rejection_sampler = self.draft_tokens_handler = None
        super().shutdown()


def _masks_of(rows: int) -> Callable[..., grammar.TreeMasks]:
    def make(*, max_num_logits: int, **kwargs: Any) -> grammar.TreeMasks:
        return grammar.TreeMasks(max_num_logits=min(max_num_logits, rows), **kwargs)

    return make


class TreeDraftTokensHandler(DraftTokensHandler):
    """Sends drafts to the scheduler for grammar masks, with their parents, unused nodes as -1.

    On the device a draft is its token and an unused node is token 0, since async scheduling embeds what lies
    there; only the host copy is packed and may say -1, which vLLM reads as "no draft".
    """

    def __init__(self, device: torch.device, store: TreeStore) -> None:
        super().__init__(device)
        self._store = store

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        """Queue the copy of [num_reqs, nodes] draft tokens for a batch."""
        if input_batch.has_structured_output_reqs:
            states, store, width = input_batch.idx_mapping, self._store, draft_tokens.shape[1]
            # A batch that needs no drafts has none: vLLM 0.33 then says so by width 0.
            parents = store.parents[states, 1 : width + 1]
            packed = grammar.pack(draft_tokens, parents, store.is_chain[states])
            node = torch.arange(width, device=draft_tokens.device)
            draft_tokens = torch.where(node < store.num_nodes[states][:, None], packed, -1)
        super().set_draft_tokens(input_batch, draft_tokens)
