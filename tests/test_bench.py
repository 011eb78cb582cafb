"""The harness under bench/: what a record must say, who reads it, and whose code an engine runs."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
sys.path.append(str(BENCH))
import _as_package  # noqa: F401  bench/ as the package `bench`, wherever the tests were started

from bench import ab, engines, models, plot, records

RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
SCRIPTS = sorted(p for p in BENCH.glob("*.py") if "__main__" in p.read_text() and p.stem != "worker")
ON_A_GPU = {"cpus": 16, "gpu": "NVIDIA H200", "driver": "580.159"}
ON_A_CPU = {"cpus": 2, "cpu": "a model"}
WHOLE = {
    "machine": ON_A_GPU,
    "versions": {"python": "3.12", "torch": "2.11", "triton": "3.6", "vllm": "0.33", "vllm-ddtree": "0.1"},
    "commit": "35f2ad7",
    "command": "python bench/step.py",
    "date": "2026-12-07T12:00:00+00:00",
    "cells": [{"batch": 1, "context": 512, "mode": "none", "gpu_ms": {"verify": 4.7}, "wall_ms": 5.0}],
}


def without(record: dict, *path: str) -> dict:
    copy = json.loads(json.dumps(record))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


@pytest.mark.parametrize("machine", [ON_A_GPU, ON_A_CPU], ids=["gpu", "cpu"])
def test_a_whole_record_is_written_and_read(tmp_path, machine):
    records.write(tmp_path / "new" / "x.json", WHOLE | {"machine": machine})
    assert records.read(tmp_path / "new" / "x.json") == WHOLE | {"machine": machine}


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        *((without(WHOLE, field), field) for field in WHOLE),
        *((WHOLE | {field: type(value)()}, field) for field, value in WHOLE.items()),
        *((without(WHOLE, "versions", name), name) for name in WHOLE["versions"]),
        (WHOLE | {"versions": WHOLE["versions"] | {"torch": None}}, "torch"),
        (without(WHOLE, "machine", "gpu"), "cpu model"),
        (without(WHOLE, "machine", "driver"), "driver"),
        (without(WHOLE, "machine", "cpus"), "cpus"),
        (without(WHOLE | {"machine": ON_A_CPU}, "machine", "cpu"), "cpu model"),
        (WHOLE | {"cells": [1.0]}, "cells"),
        (WHOLE | {"cells": {"a": 1}}, "cells"),
    ],
)
def test_a_record_that_lacks_a_field_is_neither_written_nor_read(tmp_path, lacking, named):
    path = tmp_path / "x.json"
    with pytest.raises(records.RecordError, match=re.escape(named)):
        records.write(path, lacking)
    assert not path.exists()
    path.write_text(json.dumps(lacking))
    with pytest.raises(records.RecordError, match=re.escape(named)):
        records.read(path)


def test_the_record_of_this_run(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_COMMIT", "said")  # where git does not know
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "bench.e2e", "--nodes", "8 9"])
    record = records.Record(tmp_path / "x.json", Namespace(nodes=[8], out=Path("x.json")))
    record.write([{"a": 1}], shape="small")
    found = records.read(tmp_path / "x.json")
    import torch

    import vllm_ddtree

    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["vllm-ddtree"] == vllm_ddtree.__version__
    assert found["machine"]["cpus"] == os.cpu_count()
    assert "gpu" in found["machine"] or found["machine"]["cpu"]
    assert found["command"] == "python3 -m bench.e2e --nodes '8 9'"
    assert found["date"].endswith("+00:00")
    assert found["arguments"] == {"nodes": "[8]", "out": "x.json"}
    assert found["cells"] == [{"a": 1}] and found["shape"] == "small"


def git(folder: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("git is not installed here")
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Another checkout of the package, committed, with a compiled module."""
    folder = tmp_path / "other"
    (folder / "vllm_ddtree").mkdir(parents=True)
    (folder / "vllm_ddtree" / "__init__.py").write_text('__version__ = "7.7"\n')
    (folder / "vllm_ddtree" / "_C.abi3.so").touch()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "vllm-ddtree"\n\n[project.entry-points."vllm.general_plugins"]\n'
        '# a word\nddtree = "vllm_ddtree.other:register"\n\n[tool.x]\nfiles = [\n "a",\n]\nb = "c"\n'
    )
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder


def test_the_commit_is_what_git_says_and_dirty_shows(checkout, monkeypatch):
    monkeypatch.setenv("DDTREE_COMMIT", "something else")
    head = git(checkout, "rev-parse", "HEAD")
    clean = records.commit_of(checkout)
    assert len(clean) >= 7 and head.startswith(clean)
    (checkout / "pyproject.toml").write_text("changed")
    assert records.commit_of(checkout) == f"{clean}-dirty"


def test_without_git_the_environment_says_the_commit_or_nothing_is_measured(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("DDTREE_COMMIT", raising=False)
    with pytest.raises(records.RecordError, match="DDTREE_COMMIT"):
        records.commit_of(checkout)
    monkeypatch.setenv("DDTREE_COMMIT", "abc123")
    assert records.commit_of(checkout) == "abc123"


def test_another_projects_commit_is_not_the_packages(checkout, monkeypatch):
    """A wheel in a virtual environment that lies inside some repository."""
    monkeypatch.delenv("DDTREE_COMMIT", raising=False)
    site = checkout / ".venv" / "site-packages"
    (site / "vllm_ddtree").mkdir(parents=True)
    with pytest.raises(records.RecordError, match="DDTREE_COMMIT"):
        records.commit_of(site)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_in_the_docs_is_a_record_or_marked_as_older(path):
    found = records.read(path)
    assert found["cells"]
    if found.get("before_records"):
        assert found["machine"]
    else:
        records.check(found)


def test_a_file_that_is_neither_is_refused(tmp_path):
    for name, data in {
        "list": [{"mode": "none"}],
        "no cells": {"before_records": True, "machine": "x"},
    }.items():
        (tmp_path / "x.json").write_text(json.dumps(data))
        with pytest.raises(records.RecordError):
            records.read(tmp_path / "x.json")
            pytest.fail(name)


@pytest.mark.parametrize("name", ["e2e-smollm2-h200.json", "step-8b-h200.json", "new.json"])
def test_plot_draws_old_and_new_files(tmp_path, name):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install .[bench])")
    path = tmp_path / name
    if name == "new.json":
        records.write(path, WHOLE)
    else:
        path.write_bytes((ROOT / "docs" / "results" / name).read_bytes())
    plot.draw(path)
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_says_so_and_fails_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    records.write(tmp_path / "x.json", WHOLE)
    plot.draw(tmp_path / "x.json")
    assert "matplotlib" in capsys.readouterr().out and not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_without_a_gpu_from_anywhere(script, tmp_path):
    """As a file, in another folder, where PYTHONPATH begins with a `bench` that must not be taken."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise SystemExit('the wrong bench')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage:" in done.stdout


def test_help_as_a_module():
    command = [sys.executable, "-m", "bench.plot", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr[-2000:]


def test_all_scripts_are_found():
    named = {path.stem for path in SCRIPTS}
    assert named >= {"ab", "attention", "check", "e2e", "grammar", "ops", "plot", "serve", "soak"}
    assert named >= {"steady", "step"}


def test_an_engine_says_whose_code_it_runs(checkout, tmp_path):
    """PYTHONPATH of the engine is the checkout's; one that runs other code than it was given is refused."""
    log = tmp_path / "engine.log"
    engine = engines.Engine("old", {"model": "none"}, log, code=[checkout])
    try:
        assert engine.receive() == {"package": str(checkout)}
    finally:
        engine.stop()
    empty = tmp_path / "empty"
    empty.mkdir()
    engine = engines.Engine("new", {"model": "none"}, log, code=[empty])
    with pytest.raises(RuntimeError, match=r"engine new must run vllm_ddtree of .*empty"):
        engine.wait()
    with pytest.raises(RuntimeError, match="engine new stopped"):
        engine.receive()


@pytest.mark.slow
def test_two_checkouts_draft_trees_in_one_run(tmp_path, tiny):
    """Each engine loads the plugin of its own checkout, which is installed nowhere."""
    checkouts = {}
    for name in ("old", "new"):
        folder = tmp_path / name
        shutil.copytree(ROOT / "vllm_ddtree", folder / "vllm_ddtree")
        shutil.copy(ROOT / "pyproject.toml", folder)
        git(tmp_path, "init", "-q", str(folder))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", name)
        checkouts[name] = ab.Checkout(folder, tmp_path / f"{name}-site", "DDTREE_COMMIT")
    common = engines.llm_settings(tiny[0], 256, 2, 512, kv_gib=0.25)
    common |= {"dtype": "float32", "enforce_eager": True, **engines.modes(tiny[1], [8], 2)["tree8"]}
    paths = {name: checkout.path() for name, checkout in checkouts.items()}
    ask = {"prompts": [[70, 71, 72], [80] * 9], "temperature": 0.0, "max_tokens": 8, "want_output": True}
    with engines.all_up(dict.fromkeys(paths, common), tmp_path / "x.json", paths) as up:
        answers = {name: engine.ask(**ask) for name, engine in up.items()}
    assert answers["old"]["output"] == answers["new"]["output"]
    assert answers["old"]["tokens"] == 16
    assert answers["old"]["accepted_length"] == answers["new"]["accepted_length"] > 1


def test_entry_points_of_a_checkout_are_its_own(checkout, tmp_path):
    found = ab.Checkout(checkout, tmp_path / "site", "DDTREE_COMMIT")
    assert found.version == "7.7" and found.commit == records.commit_of(checkout)
    (one,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert one.name == "vllm-ddtree" and one.version == "7.7"
    assert [(e.group, e.name, e.value) for e in one.entry_points] == [
        ("vllm.general_plugins", "ddtree", "vllm_ddtree.other:register")
    ]
    ours = ab.Checkout.entry_points((ROOT / "pyproject.toml").read_text())
    assert set(ours) == {"vllm.general_plugins", "vllm.platform_plugins"}


def test_a_checkout_that_is_none_or_not_compiled_is_refused(checkout, tmp_path):
    with pytest.raises(SystemExit, match="vllm_ddtree"):
        ab.Checkout(tmp_path, tmp_path / "site", "DDTREE_COMMIT")
    (checkout / "vllm_ddtree" / "_C.abi3.so").unlink()
    with pytest.raises(SystemExit, match="compiled"):
        ab.Checkout(checkout, tmp_path / "site", "DDTREE_COMMIT")


@pytest.mark.parametrize("shape", sorted(models.SHAPES))
def test_ab_gives_each_mode_its_settings(shape, tmp_path):
    target, drafter = models.write_configs(tmp_path, shape)
    wanted = ab.mode_settings(["old0", "new0", "new64", "none", "chain"], str(drafter), 64, (2.0, 3.0))
    spec = {name: settings.get("speculative_config") for name, settings in wanted.items()}
    assert spec["none"] is None and spec["chain"]["method"] == "dflash"
    assert (
        spec["old0"]
        == spec["new0"]
        == {
            "method": "ddtree",
            "model": str(drafter),
            "ddtree_synthetic_acceptance_length": 3.0,
        }
    )
    assert spec["new64"] == spec["new0"] | {"num_speculative_tokens": 64}
    assert spec["chain"]["synthetic_acceptance_length"] == 2.0
    config, drafting = (json.loads((path / "config.json").read_text()) for path in (target, drafter))
    assert drafting["num_target_layers"] == config["num_hidden_layers"]
    assert drafting["hidden_size"] == config["hidden_size"]


@pytest.mark.parametrize("name", ["old", "tree64", "newer64", "chain15", "new-1"])
def test_ab_refuses_other_modes_in_words(name, capsys):
    with pytest.raises(SystemExit):
        ab.arguments(["--new", ".", "--modes", name, "--out", "x.json"])
    assert "old64" in capsys.readouterr().err


STAND_IN = """
import importlib.util, json, pathlib, sys
def say(**what):
    print("@@" + json.dumps(what), flush=True)
say(package=str(pathlib.Path(importlib.util.find_spec("vllm_ddtree").origin).resolve().parents[1]))
sys.stdin.readline()
say(ready=True)
stages = {"gpu_ms": {"verify": 4.0}, "host_ms": {"verify": 0.5}, "wall_ms": 5.0, "steps": 9}
counts = {"torch.compile graphs": 0, "triton compilations": 0, "graph captures": 0}
counts["syncs"] = {"vllm/x.py:1 f": 2}
for line in sys.stdin:
    ask = json.loads(line)
    if ask.get("command"):
        say(**(counts if ask["command"] == "counts" else {}))
        continue
    many = len(ask["prompts"])
    say(tokens=many * ask["max_tokens"], seconds=0.5, accepted_length=2.0, stages=stages,
        output=[[1, 2, 3]] * many, gaps=[[0.1, 0.2, 0.3]] * many)
"""


@pytest.mark.parametrize("name", ["ab", "check", "e2e", "steady", "step"])
def test_what_a_script_writes_is_a_record(name, checkout, real, tmp_path, monkeypatch):
    """The scripts' own course. Stages are timed by CUDA events and these need a GPU: a stand-in answers."""
    worker, out = tmp_path / "stand_in.py", tmp_path / "out" / "x.json"
    worker.write_text(STAND_IN)
    monkeypatch.setattr(engines, "WORKER", worker)
    monkeypatch.setenv("DDTREE_COMMIT", "said")
    pair = ["--target", real[0], "--drafter", real[1]]
    few = ["--nodes", "8", "--batches", "1", "2"]
    both = ["--old", str(checkout), "--new", str(checkout), "--modes", "old8", "new8", "none", "chain"]
    arguments = {
        "ab": [*both, "--batches", "1", "2", "--seconds", "0", "--steady"],
        "check": [*pair, "--max-tokens", "3"],
        "e2e": [*pair, *few, "--rounds", "2", "--temperatures", "0", "--steady"],
        "steady": [*pair, "--nodes", "8", "--max-num-seqs", "2"],
        "step": [*few, "--contexts", "64"],
    }
    monkeypatch.setattr(sys, "argv", [name, *arguments[name], "--out", str(out)])
    assert not importlib.import_module(f"bench.{name}").main()
    found = records.read(out)
    records.check(found)
    if name == "ab":
        assert found["commit"] == records.commit_of(checkout) == found["checkouts"]["old"]["commit"]
        assert found["versions"]["vllm-ddtree"] == "7.7"
        assert [(c["batch"], c["mode"], c["wall_ms"]) for c in found["cells"][:4]] == [
            (1, mode, 5.0) for mode in ("old8", "new8", "none", "chain")
        ]
        assert [row["wall_ratio"] for row in found["compared"]] == [1.0, 1.0]
        assert found["cells"][-1]["steady"] == "new8"
    if name == "e2e":
        assert list(found["cells"][0]["tokens_per_second"]) == ["none", "chain", "tree8"]
        assert found["cells"][0]["tokens_per_second"]["tree8"] == [512.0, 512.0]
    if name == "step":
        assert [cell["speedup"] for cell in found["cells"]] == [1.0] * 6
    if name == "check":
        assert [cell["differences"] for cell in found["cells"]] == [[]] * len(found["cells"])


def answer(wall: float | None, tokens: float, verify: float) -> dict:
    gpu = {"verify": verify, "walk+commit": 1.0}
    stages = {"wall_ms": wall, "gpu_ms": gpu, "host_ms": {"verify": 0.5}, "steps": 9}
    return {"tokens": tokens, "seconds": 1.0, "accepted_length": 2.5, "stages": stages}


def test_ab_medians_and_spreads():
    """Spread: half of what lies between the least and the most, over the median."""
    rounds = [answer(10.0, 100, 4.0), answer(12.0, 300, 4.0), answer(11.0, 200, 5.0), answer(None, 200, 4.0)]
    cell = ab.cell(8, "new64", rounds)
    assert (cell["batch"], cell["mode"], cell["rounds"]) == (8, "new64", 4)
    assert cell["wall_ms"] == 11.0 and cell["wall_spread"] == pytest.approx(1 / 11)
    assert cell["tokens_per_second"] == 200 and cell["tokens_spread"] == pytest.approx(0.5)
    assert cell["gpu_ms"] == {"verify": 4.0, "walk+commit": 1.0}
    assert cell["gpu_spread"] == {"verify": pytest.approx(0.125), "walk+commit": 0.0}
    assert cell["host_ms"] == {"verify": 0.5} and cell["accepted_length"] == 2.5


def test_ab_compares_old_and_new_round_by_round():
    """A drift that both share is no difference."""
    old, new = [answer(w, 100, 1) for w in (10, 20, 30)], [answer(w * 1.1, 100, 1) for w in (10, 20, 30)]
    (one,) = ab.comparisons({(8, "old64"): old, (8, "new64"): new, (8, "new0"): new, (8, "none"): old})
    assert (one["batch"], one["compared"]) == (8, "new64 / old64")
    assert one["wall_ratio"] == pytest.approx(1.1) and one["wall_ratio_spread"] == pytest.approx(0)
    assert one["tokens_ratio"] == pytest.approx(1.0)
