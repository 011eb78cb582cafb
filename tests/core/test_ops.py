"""Loading, fakes and fallback of the extension."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from core_trees import draft, need_kernels, random_trees, to, walk_outputs

from vllm_ddtree import ops, reference

PACKAGE = Path(ops.__file__).parent
LIBRARY = PACKAGE / "_C.abi3.so"


def arguments(name, device):
    n, nodes, vocab = 2, 6, 9
    q = nodes + 1
    tokens, parents, counts = random_trees(3, n, nodes)
    _, child, sibling = reference.retrieve(parents, counts)
    i32 = {"dtype": torch.int32, "device": device}
    i64 = {"dtype": torch.int64, "device": device}
    tree = to(device, tokens, child, sibling, counts)
    if name == "build":
        logps, ids = draft(1, n, 3, 4, 0.0, 0.0)
        out = [torch.zeros(n, q, **i64), torch.zeros(n, q, **i32), torch.zeros(n, q, **i32)]
        out += [torch.zeros(n, q, device=device), torch.zeros(n, **i32)]
        return (*to(device, logps, ids, torch.tensor([6, 2], dtype=torch.int32)), *out)
    if name == "retrieve":
        return (
            *to(device, parents, counts),
            torch.zeros(n, q, **i64),
            torch.zeros(n, q, **i32),
            torch.zeros(n, q, **i32),
        )
    if name == "ancestor_mask":
        return (*to(device, parents, counts), torch.zeros(n, q, 1, **i32))
    if name == "walk":
        return (*tree, tree[0].clone(), *walk_outputs(device, n, q, 3))
    if name in ("walk_coins", "walk_residual"):
        probs = torch.full((n, q, vocab), 1 / vocab, device=device)
        drawn_from = [probs[:, :3].contiguous()] if name == "walk_residual" else []
        coins = torch.full((n, q), 0.5, device=device)
        return (*tree, probs, *drawn_from, coins, coins[:, 0].contiguous(), *walk_outputs(device, n, q, 3))
    accept = torch.tensor([[0, 2, 3], [7, 9, -1]], device=device)
    src, dst = torch.zeros(n, 2, **i64), torch.zeros(n, 2, **i64)
    if name == "plan_moves":
        return accept, torch.tensor([0, 7], **i32), q, torch.arange(14, device=device), src, dst
    views = [torch.rand(4, 4, 2, 8, device=device), torch.rand(4, 4, 2, 8, device=device).half()]
    src.copy_(torch.tensor([[2, 3], [-1, 9]]))
    dst.copy_(torch.tensor([[1, 2], [-1, 8]]))
    return views, ops.make_move_table(views), src, dst


@pytest.mark.parametrize("name", ops.OPS)
def test_opcheck(device, name):
    need_kernels(device)
    result = torch.library.opcheck(getattr(torch.ops.ddtree, name).default, arguments(name, device))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graph capture needs a GPU")
@pytest.mark.parametrize("name", ops.OPS)
def test_a_captured_op_replays(name):
    need_kernels("cuda")
    eager, captured = arguments(name, "cuda"), arguments(name, "cuda")
    if name == "move_rows":
        captured = ([v.clone() for v in eager[0]], *captured[1:])
        captured = (captured[0], ops.make_move_table(captured[0]), *captured[2:])
    call = getattr(ops, name)
    start = [
        t.clone()
        for a in captured
        for t in (a if isinstance(a, list) else [a])
        if isinstance(t, torch.Tensor)
    ]
    call(*captured)
    torch.cuda.synchronize()
    flat = [t for a in captured for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*captured)
    for tensor, value in zip(flat, start, strict=True):
        tensor.copy_(value)
    graph.replay()
    call(*eager)
    torch.cuda.synchronize()
    wanted = [t for a in eager for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    for i, (a, b) in enumerate(zip(flat, wanted, strict=True)):
        if name == "move_rows" and i == len(eager[0]):
            continue  # the table holds addresses, which differ
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def run_without(tmp_path, library: bytes | None):
    """Imports a copy of the package that has no module, or a broken one, and runs one op."""
    package = tmp_path / "vllm_ddtree"
    package.mkdir()
    for name in ("ops.py", "reference.py"):
        shutil.copy(PACKAGE / name, package)
    (package / "__init__.py").touch()
    if library is not None:
        (package / "_C.abi3.so").write_bytes(library)
    code = (
        "import logging; logging.basicConfig(); import torch; from vllm_ddtree import ops\n"
        "p = torch.tensor([[-1, 0, 1]], dtype=torch.int32); m = torch.zeros(1, 3, 1, dtype=torch.int32)\n"
        "for _ in range(2): ops.ancestor_mask(p, torch.tensor([2], dtype=torch.int32), m)\n"
        "print(m.flatten().tolist(), ops.has_kernels('cpu'), ops.kernels_error('cpu'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )


@pytest.mark.parametrize(("library", "reason"), [(None, "was not built"), (b"\x7fELF junk", "does not load")])
def test_without_a_usable_module_the_reference_serves(tmp_path, library, reason):
    done = run_without(tmp_path, library)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1, 3, 7] False ") and reason in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.count("slower reference path") == 1, done.stderr


def test_the_reference_is_never_captured(monkeypatch):
    """Without a GPU torch is told of one that captures; the reference would wait for the device."""
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    counts, mask = torch.ones(1, dtype=torch.int32), torch.zeros(1, 2, 1, dtype=torch.int32)
    monkeypatch.setattr(ops, "_DEVICES", {"cpu": False, "cuda": False})
    if torch.cuda.is_available():
        parents, counts, mask = to("cuda", parents, counts, mask)
        with pytest.raises(RuntimeError, match="CUDA graph needs"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            ops.ancestor_mask(parents, counts, mask)
    else:
        for name in ("is_available", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(RuntimeError, match=r"CUDA graph needs.* install the wheel"):
            ops._compiled(SimpleNamespace(device=torch.device("cuda")))


def test_kernels_error_is_consistent():
    for device in ("cpu", "cuda"):
        assert (ops.kernels_error(device) is None) == ops.has_kernels(device)


@pytest.mark.skipif(not LIBRARY.exists(), reason="no extension was built")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_libtorch_is_needed_and_cudart_is_not():
    text = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
    assert "libtorch.so" in needed, "the weak stream symbol would stay null on a GPU"
    assert not [name for name in needed if "cudart" in name], "the CUDA runtime must be static"
    assert not [name for name in needed if "libpython" in name or "torch_python" in name]
