"""Tree attention on a GPU, as a vLLM attention backend on top of FlashAttention.

Owns the split of a batch into rows verified as trees and the rest, and of a tree's attention into the
context (FlashAttention, non-causal over the context only) and the tree's own keys (our kernel, which
continues the softmax). Batches without trees and draft layers take vLLM's path unchanged.
Invariant: what is launched depends on host-known shapes only, so metadata built for the replay of a
captured graph has the form that it had at capture, whatever the trees are.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

try:
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.attention.backends import flash_attn as _fa
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionBackend,
        FlashAttentionImpl,
        FlashAttentionMetadata,
        FlashAttentionMetadataBuilder,
    )
except ImportError as error:
    raise ImportError(
        f"ddtree's GPU attention builds on vLLM's FlashAttention backend as it is in 0.32 and 0.33; {error}. "
        "Install one of these versions."
    ) from error

from vllm_ddtree.engine.attention_plan import plan_rows, slice_rows, split_bound
from vllm_ddtree.engine.state import TreeStep, tree_state
from vllm_ddtree.kernels.paged_tree import paged_tree_attention
from vllm_ddtree.kernels.tree_attention import compile_tree_attention, tree_attention_

_FUSED = "fused"


@dataclass(frozen=True)
class TreePlan:
    """The leading rows of a batch that go through the tree kernel, and the metadata of the rest.

    Attributes:
        context: FlashAttention metadata of these rows with context lengths as ``seq_lens``, non-causal.
        ctx: [num_reqs] int32 context lengths, a view of a persistent buffer.
        mask, tree_len: the step's ancestor bits and tree sizes, in batch order (persistent).
        num_reqs, num_tokens, max_query_len: host shapes of these rows.
        rest: vLLM's metadata of the rows behind, or None.
        float32: the fused kernel is the only path, for draft layers too.
        non_causal: these rows all see each other (float32 draft layers).
    """

    context: FlashAttentionMetadata
    ctx: torch.Tensor
    mask: torch.Tensor
    tree_len: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    rest: FlashAttentionMetadata | None = None
    float32: bool = False
    non_causal: bool = False


@dataclass
class TreeFlashAttentionMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole batch (valid by itself) and the plan of its trees."""

    tree: TreePlan | None = None


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """Backend registered as CUSTOM for the target's layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Return the registry's name of this backend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        """Return the implementation."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        """Return the metadata builder."""
        return TreeFlashAttentionMetadataBuilder

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Bidirectional image ranges and trees are not combined."""
        return False


class TreeFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata, and around it the plan of a step with trees."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    # A block table put into existing metadata would miss the plan's slices.
    supports_update_block_table: bool = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._float32 = vllm_config.model_config.dtype == torch.float32
        layers = vllm_config.compilation_config.static_forward_context
        self._draft_only = all(getattr(layers.get(name), "is_draft_layer", False) for name in layer_names)
        if not self._draft_only or self._float32:
            # The draft's graph refreshes metadata in place, which knows nothing of plans.
            self.supports_draft_decode_metadata_update = False
        if self._float32:
            self.aot_schedule = False
        max_reqs = vllm_config.scheduler_config.max_num_seqs
        self._ctx = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._no_tree = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._no_mask = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        self._num_sms = _num_sms(device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """Build the metadata of one step; a plan is attached where trees can occur."""
        common = common_attn_metadata
        step = None if self._draft_only else tree_state()
        if self._float32:
            return self._build_float32(common, step)
        rows = 0
        if step is not None and common.causal is True:
            rows, widest = plan_rows(common.query_start_loc_cpu, step.q_len, step.num_tree_reqs)
        if rows == 0 or step is None:
            return super().build(common_prefix_len, common, fast_build)

        ctx = self._context_lens(common)
        whole = rows == common.num_reqs
        tokens = common.num_actual_tokens if whole else int(common.query_start_loc_cpu[rows])
        context = self._build_bounded(slice_rows(common, 0, rows, 0, tokens, widest, ctx), fast_build)
        rest = None
        if not whole:
            # The builder has one schedule buffer; only FULL graphs need its address, and they are whole.
            if context.scheduler_metadata is not None:
                context.scheduler_metadata = context.scheduler_metadata.clone()
            lens = common.query_start_loc_cpu[rows + 1 :] - common.query_start_loc_cpu[rows:-1]
            behind = slice_rows(
                common, rows, common.num_reqs, tokens, common.num_actual_tokens, int(lens.max())
            )
            rest = super().build(common_prefix_len, behind, fast_build)
        plan = TreePlan(context, ctx[:rows], step.mask, step.tree_len, rows, tokens, widest, rest)
        return self._with_plan(common, context, plan)

    def _context_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Context lengths on the device, in place; the host's are optimistic under async scheduling."""
        reqs, starts = common.num_reqs, common.query_start_loc
        ctx = self._ctx[:reqs]
        torch.sub(common.seq_lens[:reqs], starts[1 : reqs + 1], out=ctx)
        ctx.add_(starts[:reqs])
        return ctx

    def _build_bounded(self, common: CommonAttentionMetadata, fast_build: bool) -> FlashAttentionMetadata:
        limit = self.max_num_splits
        try:
            self.max_num_splits = split_bound(
                common.num_reqs,
                common.max_query_len,
                self.num_heads_q,
                self.num_heads_kv,
                self._num_sms,
                limit,
            )
            return super().build(0, common, fast_build)
        finally:
            self.max_num_splits = limit

    def _build_float32(
        self, common: CommonAttentionMetadata, step: TreeStep | None
    ) -> TreeFlashAttentionMetadata:
        """FlashAttention has no float32: every row goes through the fused kernel."""
        if not isinstance(common.causal, bool):
            raise NotImplementedError("ddtree's float32 attention needs one causality for the whole batch.")
        ctx = self._context_lens(common)
        # Rows wider than a tree are prompts: tree_len is 0 there.
        mask, tree_len = (self._no_mask, self._no_tree) if step is None else (step.mask, step.tree_len)
        starts = common.query_start_loc_cpu
        widest = int((starts[1:] - starts[:-1]).max())
        context = super().build(0, common, True)
        plan = TreePlan(
            context,
            ctx,
            mask,
            tree_len,
            common.num_reqs,
            common.num_actual_tokens,
            widest,
            float32=True,
            non_causal=not common.causal,
        )
        return self._with_plan(common, context, plan)

    @staticmethod
    def _with_plan(
        common: CommonAttentionMetadata, context: FlashAttentionMetadata, plan: TreePlan
    ) -> TreeFlashAttentionMetadata:
        whole = {f.name: getattr(context, f.name) for f in fields(FlashAttentionMetadata)}
        # Without a schedule the metadata of the whole batch is valid for a layer that ignores the plan.
        whole.update(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            scheduler_metadata=None,
        )
        return TreeFlashAttentionMetadata(**whole, tree=plan)


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """FlashAttention, with the tree kernel behind it on rows that are verified as trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if tuple(self.sliding_window) != (-1, -1) or self.alibi_slopes is not None:
            raise NotImplementedError(
                "ddtree's GPU attention needs full attention without ALiBi: windows and slopes count rows, "
                "and a tree's rows are not positions. Remove the speculative config for this model."
            )
        self._fused = _attention_option() == _FUSED
        self._compiled = False
        self._sms: int | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend one step; shapes as in vLLM's FlashAttention."""
        plan = getattr(attn_metadata, "tree", None)
        if plan is None or (getattr(layer, "is_draft_layer", False) and not plan.float32):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "ddtree's GPU attention can't quantize its output; turn that fusion off."
            )
        tokens = plan.num_tokens
        self._attend_trees(layer, query[:tokens], kv_cache, plan, output[:tokens])
        if plan.rest is not None:
            super().forward(layer, query[tokens:], key, value, kv_cache, plan.rest, output[tokens:])
        return output

    def _attend_trees(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: TreePlan,
        output: torch.Tensor,
    ) -> None:
        context = plan.context
        # The cache is [blocks, heads, slots, K|V]; FlashAttention and our kernel want slots before heads.
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        # TMA rejects the arbitrary stride of a dimension of size 1.
        key_cache = canonicalize_singleton_dim_strides(key_cache)
        value_cache = canonicalize_singleton_dim_strides(value_cache)
        quantized = _fa.is_quantized_kv_cache(self.kv_cache_dtype)
        if quantized:
            key_cache = key_cache.view(current_platform.fp8_dtype())
            value_cache = value_cache.view(current_platform.fp8_dtype())
        if self._sms is None:
            self._sms = _num_sms(query.device)
        shared: dict[str, Any] = {
            "block_table": context.block_table,
            "cu_q": context.query_start_loc,
            "ctx": plan.ctx,
            "mask": plan.mask,
            "tree_len": plan.tree_len,
            "max_query_len": plan.max_query_len,
            "num_reqs": plan.num_reqs,
            "scale": self.scale,
            "softcap": float(self.logits_soft_cap),
            "sinks": self.sinks,
            "non_causal": plan.non_causal,
        }
        if quantized:
            shared.update(q_scale=layer._q_scale, k_scale=layer._k_scale, v_scale=layer._v_scale)
        output = output.view(query.shape)
        if self._fused or plan.float32:
            paged_tree_attention(query, key_cache, value_cache, output, num_sms=self._sms, **shared)
            return

        descale = (plan.num_reqs, self.num_kv_heads)
        _, lse = _fa.flash_attn_varlen_func(
            q=query,
            k=key_cache,
            v=value_cache,
            out=output,
            cu_seqlens_q=context.query_start_loc,
            max_seqlen_q=plan.max_query_len,
            seqused_k=plan.ctx,
            max_seqlen_k=context.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            window_size=[-1, -1],
            block_table=context.block_table,
            softcap=self.logits_soft_cap,
            return_softmax_lse=True,
            scheduler_metadata=context.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            q_descale=layer._q_scale.expand(descale) if self.supports_quant_query_input else None,
            k_descale=layer._k_scale.expand(descale),
            v_descale=layer._v_scale.expand(descale),
            num_splits=context.max_num_splits,
        )
        if not self._compiled:
            # The eager run before the first capture comes through here, so serving compiles nothing.
            compile_tree_attention(query, key_cache, value_cache, output, lse, **shared)
            self._compiled = True
        tree_attention_(query, key_cache, value_cache, output, lse, num_sms=self._sms, **shared)


def probe() -> list[str]:
    """List what this vLLM lacks of what this file relies on; empty when all is there."""
    problems = []
    wanted: list[tuple[Any, list[str]]] = [
        (FlashAttentionMetadataBuilder.build, ["common_prefix_len", "common_attn_metadata", "fast_build"]),
        (
            FlashAttentionImpl.forward,
            ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"],
        ),
    ]
    if current_platform.is_cuda():
        function = getattr(_fa, "flash_attn_varlen_func", None)
        if function is None:
            problems.append("vLLM was built without FlashAttention (flash_attn_varlen_func is missing).")
        else:
            names = "seqused_k causal block_table softcap return_softmax_lse scheduler_metadata fa_version"
            wanted.append((function, [*names.split(), "num_splits", "q_descale", "k_descale", "v_descale"]))
    for function, names_wanted in wanted:
        have = inspect.signature(function).parameters
        missing = [name for name in names_wanted if name not in have]
        if missing:
            problems.append(f"{function.__qualname__} has no parameter {', '.join(missing)}.")
    for owner, names_wanted in (
        (
            CommonAttentionMetadata,
            "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
            "max_seq_len block_table_tensor slot_mapping causal",
        ),
        (
            FlashAttentionMetadata,
            "query_start_loc seq_lens block_table max_seq_len scheduler_metadata max_num_splits causal",
        ),
    ):
        have_fields = {f.name for f in fields(owner)}
        missing = [name for name in names_wanted.split() if name not in have_fields]
        if missing:
            problems.append(f"{owner.__name__} has no field {', '.join(missing)}.")
    if not hasattr(_fa, "is_quantized_kv_cache"):
        problems.append("vllm.v1.attention.backends.flash_attn has no is_quantized_kv_cache.")
    return problems


def _attention_option() -> str:
    """``ddtree_attention_backend`` of the engine being built; its absence means the default."""
    config = _fa.get_current_vllm_config_or_none()
    stored = (config.additional_config or {}).get("ddtree") if config is not None else None
    return (stored or {}).get("attention_backend", "auto")


def _num_sms(device: torch.device) -> int:
    # 132 is an H100's or H200's count; only reached without a GPU, in tests of the host logic.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
