"""Bad input stops start-up with one clear error that names everything wrong."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from engines import GPU, SETTINGS, tree
from tiny_models import make_drafter, make_target
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ddtree import ops
from vllm_ddtree.engine import checks
from vllm_ddtree.engine.config import step_sizes, tree_options
from vllm_ddtree.options import TreeOptions

# vLLM counts the GPUs before anything asks ddtree.
not_on_one_gpu = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="a second GPU would be needed to get that far"
)
ARGS = {key: value for key, value in SETTINGS.items() if key != "seed"}


def refuse(target, speculative, **changes):
    """The text of the error that creating the engine's config raises."""
    with pytest.raises(ValueError) as caught:
        EngineArgs(model=target, speculative_config=speculative, **(ARGS | changes)).create_engine_config()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"vocab_size": 300}, "vocabulary has 300 tokens, the target's 272"),
        ({"hidden_size": 128}, "hidden size is 128, the target's 64"),
        ({"dflash_config": {"mask_token_id": 258, "target_layer_ids": [0, 1, 7]}}, "[0, 1, 7] don't fit"),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 1, 2]}}, "mask_token_id 999"),
        ({"num_target_layers": 30}, "trained for a target of 30 layers"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "is not a DFlash model"),
        ({"architectures": ["DFlash2DraftModel"]}, "drafts with another class"),
    ],
)
def test_drafter_that_does_not_fit(tiny, tmp_path, change, words):
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny[1], drafter)
    config = json.loads((drafter / "config.json").read_text()) | change
    (drafter / "config.json").write_text(json.dumps(config))
    assert words in refuse(tiny[0], tree(16, model=str(drafter)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens = 0"),
        ({"num_speculative_tokens": -3}, "num_speculative_tokens = -3"),
        ({"num_speculative_tokens": 600}, "less than or equal to 512"),
        ({"num_speculative_tokens": 400}, "400 nodes don't fit max_model_len 256"),
        ({"ddtree_max_dept": 3}, "Did you mean 'ddtree_max_depth'?"),
        ({"ddtree_max_depth": 0}, "ddtree_max_depth = 0"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method"),
        ({"model": "/nowhere/at/all"}, "can't be read"),
    ],
)
def test_bad_option(tiny, options, words):
    assert words in refuse(tiny[0], {"method": "ddtree", "model": tiny[1], **options})


def test_a_budget_below_one_tree(tiny):
    text = refuse(tiny[0], tree(200, model=tiny[1]), max_num_batched_tokens=200)
    assert "200 nodes need max_num_batched_tokens >= 201" in text
    assert "max_num_scheduled_tokens" not in text


@pytest.mark.parametrize("name", ["long_prefill_token_threshold", "max_num_scheduled_tokens"])
@pytest.mark.parametrize("speculative", [tree(64), {"method": "ddtree"}], ids=["fixed", "by batch"])
def test_a_step_of_a_request_that_has_no_room_for_its_tree(tiny, name, speculative):
    """A threshold of 16 would trip an assertion of vLLM's scheduler when a request joins; so few scheduled
    tokens would let no request join while another runs."""
    speculative = {"model": tiny[1], **speculative}
    for tokens in (16, 64):
        text = refuse(tiny[0], speculative, **{name: tokens})
        assert f"{name} is {tokens}, but a tree of 64 nodes is 65 tokens" in text
    EngineArgs(model=tiny[0], speculative_config=speculative, **(ARGS | {name: 65})).create_engine_config()


def test_vllms_short_flags(tiny):
    """--spec-method, --spec-model and --spec-tokens say the same as the keys, and not both at once."""
    short = {"spec_method": "ddtree", "spec_model": tiny[1], "spec_tokens": 24}
    args = EngineArgs(model=tiny[0], **(ARGS | short))
    for _ in range(2):
        config = args.create_engine_config()
        assert config.speculative_config.num_speculative_tokens == 24
        assert tree_options(config).num_nodes == 24
    assert (args.speculative_config, args.spec_method, args.spec_tokens) == (None, "ddtree", 24)
    text = refuse(tiny[0], tree(16, model=tiny[1]), spec_tokens=24)
    assert "--spec-tokens 24 and num_speculative_tokens = 16" in text
    assert "--spec-method dflash and method = 'ddtree'" in refuse(
        tiny[0], tree(16, model=tiny[1]), spec_method="dflash"
    )
    plain = EngineArgs(model=tiny[0], **(ARGS | short | {"spec_method": "dflash", "spec_tokens": 7}))
    assert tree_options(plain.create_engine_config()) is None


def test_the_command_line_knows_the_method(tiny):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    short = ["--spec-model", tiny[1], "--spec-tokens", "24"]
    args = AsyncEngineArgs.from_cli_args(
        parser.parse_args(["--model", tiny[0], "--spec-method", "ddtree", *short])
    )
    vars(args).update(ARGS)
    assert tree_options(args.create_engine_config()).num_nodes == 24
    assert parser.parse_args(["--spec-method", "dflash"]).spec_method == "dflash"
    with pytest.raises(SystemExit):
        parser.parse_args(["--spec-method", "ddtre"])


@not_on_one_gpu
def test_one_small_number_of_nodes_under_data_parallelism(tiny):
    """vLLM drops schedules there; the number that holds for every batch is then not the largest tier's."""
    args = EngineArgs(
        model=tiny[0],
        speculative_config={"method": "ddtree", "model": tiny[1]},
        **(ARGS | {"data_parallel_size": 2}),
    )
    found = args.create_engine_config()
    assert found.speculative_config.num_speculative_tokens_per_batch_size is None
    assert found.speculative_config.num_speculative_tokens == tree_options(found).num_nodes == 16


def test_batch_invariance_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    text = refuse(tiny[0], tree(16, model=tiny[1]))
    assert "VLLM_BATCH_INVARIANT=1" in text and "Unset it" in text
    EngineArgs(model=tiny[0], **ARGS).create_engine_config()


def test_target_without_a_known_drafter(tiny):
    assert "no public DFlash drafter is known" in refuse(tiny[0], {"method": "ddtree"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "sliding-window or chunked attention",
        ),
    ],
)
def test_target_that_is_refused(tmp_path, tiny, change, words):
    target = make_target(tmp_path / "target", "qwen2", **change)
    assert words in refuse(str(target), tree(16, model=tiny[1]))


@not_on_one_gpu
def test_parallel_layouts_that_are_refused(tiny):
    text = refuse(tiny[0], tree(16, model=tiny[1]), pipeline_parallel_size=2)
    assert "pipeline parallelism" in text


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_a_connector_behind_offloading_is_refused(tiny, backend):
    text = refuse(tiny[0], tree(16, model=tiny[1]), kv_offloading_size=1, kv_offloading_backend=backend)
    assert "can't run with a KV connector" in text and text.count("\n- ") == 1


def test_a_connector_that_only_the_resolved_config_has_is_refused(tiny):
    """Whoever put it there: vLLM itself, a platform, another plugin."""
    config = EngineArgs(
        model=tiny[0], speculative_config=tree(16, model=tiny[1]), **ARGS
    ).create_engine_config()
    options, sizes = tree_options(config), step_sizes(config)
    assert checks.resolved_problems(config, options, sizes) == []
    config.kv_transfer_config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    (problem,) = checks.resolved_problems(config, options, sizes)
    assert "can't run with a KV connector" in problem


def test_an_additional_config_that_is_no_dict_is_refused(tiny):
    """A dict is where the options travel; vLLM also takes an object with a hash."""
    args = EngineArgs(model=tiny[0], speculative_config=tree(16, model=tiny[1]), **ARGS)
    for found in (SimpleNamespace(compute_hash=lambda: "x"), ["a"]):
        args.additional_config = found
        with pytest.raises(ValueError, match=r"additional_config .* must be a dict"):
            args.create_engine_config()


def test_routed_experts_are_refused(tiny):
    text = refuse(tiny[0], tree(16, model=tiny[1]), enable_return_routed_experts=True)
    assert "can't run with returned routed experts" in text


def test_structured_backend_without_rollback_is_refused(tiny):
    backend = {"backend": "lm-format-enforcer"}
    text = refuse(tiny[0], tree(16, model=tiny[1]), structured_outputs_config=backend)
    assert "Use xgrammar, guidance or outlines." in text


def test_trace_replay_and_watermarks_are_refused(tiny):
    text = refuse(tiny[0], tree(16, model=tiny[1]), enable_trace_replay=True)
    assert "trace replay" in text
    watermark = {"key": 1}
    assert "watermarking" in refuse(tiny[0], tree(16, model=tiny[1]), watermark_config=watermark)


def test_foreign_worker_class_is_refused(tiny):
    text = refuse(tiny[0], tree(16, model=tiny[1]), worker_cls="some.other.Worker")
    assert "--worker-cls is 'some.other.Worker'" in text


@pytest.mark.parametrize("version", [None, 2])
@pytest.mark.parametrize("head_size", [128, 256])
@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_blackwells_own_kernel_for_heads_of_256_is_refused(
    tmp_path, monkeypatch, version, head_size, backend
):
    """No Blackwell here: its capability is made up, what follows from it is vLLM's choice of a kernel."""
    target = make_target(tmp_path / "target", head_dim=head_size)
    config = EngineArgs(model=str(target), **(ARGS | {"dtype": "bfloat16"})).create_engine_config()
    config.attention_config.flash_attn_version = version
    name = "vllm.vllm_flash_attn"  # which has its kernels on a GPU only
    extension = SimpleNamespace(is_fa_version_supported=lambda _: True, fa_version_unsupported_reason=None)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(flash_attn_interface=extension))
    monkeypatch.setitem(sys.modules, f"{name}.flash_attn_interface", extension)

    def problems(capability):
        found = DeviceCapability(*capability)
        monkeypatch.setattr(current_platform, "get_device_capability", lambda *_: found)
        return checks.attention_problems(config, TreeOptions(num_nodes=16, attention_backend=backend))

    refused = (version, head_size, backend) == (None, 256, "auto")
    assert ["heads of 256" in problem for problem in problems((10, 0))] == [True] * refused
    assert problems((9, 0)) == []


class ToldOfAGpu:
    """vLLM's platform as ddtree's checks see it, saying that it is a GPU."""

    def __init__(self, capability):
        self.capability = capability

    def is_cuda(self):
        return True

    def is_cpu(self):
        return False

    def get_device_capability(self):
        return self.capability

    def __getattr__(self, name):
        return getattr(current_platform, name)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("capability", [None, DeviceCapability(7, 5), DeviceCapability(12, 0)])
def test_a_gpu_that_could_not_run_the_kernels(tiny, monkeypatch, kernels, capability):
    """Real libraries that are broken are in tests/test_status.py."""
    monkeypatch.setattr(checks, "current_platform", ToldOfAGpu(capability))
    monkeypatch.setattr(ops, "_DEVICES", {"cpu": True, "cuda": kernels})
    wanted = ["needs its compiled CUDA kernels"] * (not kernels)
    wanted += ["8.0 (Ampere) or newer, found 7.5"] * (capability == (7, 5))
    found = checks.platform_problems()
    assert len(found) == len(wanted) and all(words in text for words, text in zip(wanted, found, strict=True))
    if wanted:
        assert all(text in refuse(tiny[0], tree(16, model=tiny[1])) for text in found)


@not_on_one_gpu
def test_every_problem_is_listed_at_once(tmp_path, tiny):
    drafter = make_drafter(tmp_path / "drafter", vocab_size=300, num_target_layers=9)
    text = refuse(tiny[0], tree(16, model=str(drafter)), pipeline_parallel_size=2)
    assert text.count("\n- ") == 3


@pytest.mark.skipif(GPU, reason="about CPU mode")
@pytest.mark.parametrize("missing", ["TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"])
def test_cpu_without_the_interpreter_names_what_to_set(tiny, monkeypatch, missing):
    monkeypatch.setenv(missing, "0")
    assert f"set {missing}=1" in refuse(tiny[0], tree(16, model=tiny[1]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "recurrent layers"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"runner_type": "pooling"}, "needs a generating model"),
        ({"enable_trace_replay": True}, "trace replay"),
    ],
)
def test_sentence_of_each_refused_kind_of_target(tiny, change, words):
    """The real models can't be had here, so the flag that vLLM derives from them is set on a real config."""
    config = EngineArgs(model=tiny[0], **ARGS).create_model_config()
    assert checks.target_problems(config) == []
    view = SimpleNamespace(
        **{name: getattr(config, name) for name in FLAGS}, get_sliding_window=config.get_sliding_window
    )
    vars(view).update(change)
    (problem,) = checks.target_problems(view)
    assert words in problem


FLAGS = (
    "model",
    "runner_type",
    "hf_text_config",
    "is_encoder_decoder",
    "use_mla",
    "is_hybrid",
    "is_attention_free",
    "is_multimodal_model",
    "enable_trace_replay",
    "return_sampling_mask",
)
