"""Every place where vLLM is patched, as data: one row per target, probed before use.

Owns installing the rows. A row whose target is missing or has another signature is not patched; the
complaint is kept and raised only if an engine asks for ddtree. On a version of vLLM that was not tried
nothing is patched at all; the warning at import then says why, and vLLM that it knows no such method.
Invariant: engines that don't ask for ddtree run vLLM's own code, reached through one ``if`` that raises for
no argument, with the arguments as they were given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm_ddtree.options import METHOD
from vllm_ddtree.status import version_problem

# Set on the SpeculativeConfig of a ddtree engine, which otherwise says method=dflash.
IS_TREE = "_ddtree"


@dataclass(frozen=True)
class Hook:
    """One patched method or property: where it is, the parameters we rely on, and what wraps it."""

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    why: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


def _stored_options(vllm_config: Any) -> dict[str, Any] | None:
    """What config.py put into a VllmConfig; None for an engine without ddtree, whose place for it may hold
    anything."""
    additional = getattr(vllm_config, "additional_config", None)
    return additional.get(METHOD) if isinstance(additional, dict) else None


def _wrap_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        for action in getattr(parser, "_actions", ()):
            choices = getattr(action, "choices", None)
            if "--spec-method" in getattr(action, "option_strings", ()) and isinstance(choices, Iterable):
                action.choices = [*choices, METHOD]
        return parser

    return add_cli_args


def _wrap_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not asks_for_ddtree(self):
            return original(self, target_model_config, target_parallel_config, *args, **kwargs)
        raise_problems()
        from vllm_ddtree.engine.config import create_tree_config

        return create_tree_config(self, target_model_config, target_parallel_config, original)

    return create_speculative_config


def _wrap_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not asks_for_ddtree(self):
            return original(self, *args, **kwargs)
        from vllm_ddtree.engine.config import check_engine_config

        raise_problems()
        vllm_config = original(self, *args, **kwargs)
        check_engine_config(vllm_config)
        return vllm_config

    return create_engine_config


def _wrap_lookahead_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def num_lookahead_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _stored_options(self) is None:
            return original(self, *args, **kwargs)
        from vllm_ddtree.engine.config import step_sizes

        return step_sizes(self).lookahead_slots

    return num_lookahead_tokens


def _wrap_new_slots(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def max_num_new_slots_for_drafting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 0 if getattr(self, IS_TREE, False) else original(self, *args, **kwargs)

    return max_num_new_slots_for_drafting


def _wrap_scheduled_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _set_max_num_scheduled_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _stored_options(self) is None:
            return original(self, *args, **kwargs)
        scheduler = self.scheduler_config
        if scheduler.max_num_scheduled_tokens is None:
            scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
        return None

    return _set_max_num_scheduled_tokens


def _wrap_validate_spec_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(speculative_config, IS_TREE, False):
            from vllm.exceptions import VLLMValidationError

            from vllm_ddtree.engine.checks import request_problem

            problem = request_problem(self)
            if problem:
                raise VLLMValidationError(problem)
            return None
        return original(self, speculative_config, *args, **kwargs)

    return _validate_spec_decode


def _wrap_validate_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_tokens(self: Any, request: Any, spec_tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        options = _stored_options(getattr(self, "vllm_config", None))
        if options is None:
            return original(self, request, spec_tokens, *args, **kwargs)
        from vllm_ddtree.engine import grammar

        tokens = grammar.unpack(request, spec_tokens)
        if tokens is not None:
            return tokens
        kept = original(self, request, spec_tokens, *args, **kwargs)
        return grammar.with_ruled_out(kept, spec_tokens) if options.get("deriver") == "residual" else kept

    return validate_tokens


def _wrap_grammar_bitmask(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grammar_bitmask(
        self: Any,
        requests: Any,
        structured_output_request_ids: Any,
        scheduled_spec_decode_tokens: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        drafts = (requests, structured_output_request_ids, scheduled_spec_decode_tokens)
        if _stored_options(getattr(self, "vllm_config", None)) is None:
            return original(self, *drafts, *args, **kwargs)
        from vllm_ddtree.engine import grammar

        with grammar.trees(*drafts), grammar.rows_of_step(self, *drafts[1:]):
            return original(self, *drafts, *args, **kwargs)

    return grammar_bitmask


HOOKS: tuple[Hook, ...] = (
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "add_cli_args",
        ("parser",),
        "--spec-method takes the names in a Literal only",
        _wrap_cli_args,
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
        "turns method=ddtree into a dflash config plus our worker class and attention backend",
        _wrap_speculative_config,
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "create_engine_config",
        ("self",),
        "checks what is only known once every default is resolved (token budget, runner version)",
        _wrap_engine_config,
    ),
    Hook(
        "vllm.config",
        "VllmConfig",
        "num_lookahead_tokens",
        ("self",),
        "reserves cache slots for one drafted row per node; the drafter writes a block, whatever the nodes",
        _wrap_lookahead_tokens,
    ),
    Hook(
        "vllm.config",
        "VllmConfig",
        "_set_max_num_scheduled_tokens",
        ("self",),
        "0.33 admits only as many requests as its buffers hold drafted rows for; the drafter has its own",
        _wrap_scheduled_tokens,
    ),
    Hook(
        "vllm.config",
        "SpeculativeConfig",
        "max_num_new_slots_for_drafting",
        ("self",),
        "0.32 keeps a row per node free beside every request's; drafts are in a forward of their own",
        _wrap_new_slots,
    ),
    Hook(
        "vllm.sampling_params",
        "SamplingParams",
        "_validate_spec_decode",
        ("self", "speculative_config"),
        "vLLM turns min_p and logit_bias away with any speculation, which are exact at every node of a tree, "
        "and lets logprob_token_ids through, which are not",
        _wrap_validate_spec_decode,
    ),
    Hook(
        "vllm.v1.structured_output",
        "StructuredOutputManager",
        "validate_tokens",
        ("self", "request", "spec_tokens"),
        "cuts drafts at the first that the grammar refuses, as if they were a chain",
        _wrap_validate_tokens,
    ),
    Hook(
        "vllm.v1.structured_output",
        "StructuredOutputManager",
        "grammar_bitmask",
        ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        "advances the matcher from draft to draft, as if they were a chain",
        _wrap_grammar_bitmask,
    ),
)

_problems: list[str] = []
# Rows that this process has patched: another plugin's wrapper around ours would hide that.
_patched: set[Hook] = set()


def asks_for_ddtree(engine_args: Any) -> bool:
    """Return whether this engine's speculative config, or ``--spec-method``, names our method."""
    config = getattr(engine_args, "speculative_config", None)
    named = config.get("method") if isinstance(config, Mapping) else None
    return METHOD in (named, getattr(engine_args, "spec_method", None))


def install() -> None:
    """Patch every row of the table once per process; keep complaints for :func:`raise_problems`."""
    if version_problem():
        return
    _problems.clear()
    for hook in HOOKS:
        owner = getattr(import_module(hook.module), hook.owner, None)
        found = inspect.getattr_static(owner, hook.method, None)
        is_property = isinstance(found, property)
        original = found.fget if is_property else getattr(owner, hook.method, None)
        if hook in _patched:
            continue
        complaint = _probe(hook, original)
        if complaint:
            _problems.append(complaint)
            continue
        assert original is not None
        wrapped = hook.wrap(original)
        kind = property if is_property else staticmethod if isinstance(found, staticmethod) else None
        setattr(owner, hook.method, kind(wrapped) if kind else wrapped)
        _patched.add(hook)


def raise_problems() -> None:
    """Raise ValueError with every complaint of :func:`install`, if there is one."""
    if _problems:
        raise ValueError("ddtree can't run on this vLLM:\n- " + "\n- ".join(_problems))


def _probe(hook: Hook, original: Any) -> str | None:
    where = f"{hook.module}.{hook.owner}.{hook.method}"
    if original is None:
        return f"{where} does not exist here, and ddtree needs it ({hook.why})."
    try:
        parameters = inspect.signature(original).parameters
    except (TypeError, ValueError) as error:
        return f"{where} does not say what it takes ({error}), ddtree expects {hook.parameters} ({hook.why})."
    kinds = inspect.Parameter
    found = tuple(name for name, one in parameters.items() if one.kind is kinds.POSITIONAL_OR_KEYWORD)
    expected = hook.parameters
    if {kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD} <= {one.kind for one in parameters.values()}:
        # Another plugin's wrapper without functools.wraps: it takes whatever comes and hands it on.
        expected = expected[: len(found)]
    if found[: len(expected)] != expected:
        return f"{where} takes {tuple(parameters)}, ddtree expects {hook.parameters} ({hook.why})."
    return None
