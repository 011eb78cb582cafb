"""Settings of every test: the real engine on a CPU, in this process, offline."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports vLLM or Triton.
os.environ.update(
    {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread per engine, on any core: with more, two pytest workers on two cores wait for each other.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not os.environ.get("DDTREE_TEST_GPU")
    else {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM's own attention kernel would multiply float32 in tf32, and near ties then fall either way.
        "TRITON_F32_DEFAULT": "ieee",
        # Many workers share the cores.
        "OMP_NUM_THREADS": "2",
    }
)

import pytest

pytest.register_assert_rewrite("driving", "servers")  # they assert, too

if os.environ.get("DDTREE_TEST_GPU"):
    collect_ignore = ["engine/test_cpu_mode.py"]  # about the CPU mode's own kernels
ROOT = Path(__file__).parent.parent
REAL_TARGET = ROOT / ".models" / "SmolLM2-135M-Instruct"
REAL_DRAFTER = ROOT / "models" / "smollm2-135m-instruct-dflash"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of the tiny target and its drafter."""
    from tiny_models import make_drafter, make_target

    root = tmp_path_factory.mktemp("tiny")
    return str(make_target(root / "target")), str(make_drafter(root / "drafter"))


@pytest.fixture(scope="session")
def marking(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny target with tokens that mark thoughts and tool calls, and its drafter."""
    from tiny_models import MARKS, make_drafter, make_target

    root = tmp_path_factory.mktemp("marking")
    return str(make_target(root / "target", words=MARKS)), str(make_drafter(root / "drafter"))


@pytest.fixture(scope="session")
def real() -> tuple[str, str]:
    """Folders of SmolLM2-135M-Instruct and its drafter."""
    if not REAL_TARGET.exists():
        pytest.skip(f"{REAL_TARGET} is missing: run scripts/fetch_models.py")
    return str(REAL_TARGET), str(REAL_DRAFTER)
