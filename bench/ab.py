"""Two checkouts of the package in one run, round by round in turn: milliseconds of a step by stage, tokens/s.

    python bench/ab.py --old DIR --new DIR --shape 8b --modes old64 new64 none chain --out result.json

Modes: ``none`` and ``chain`` (both by --new), and ``old`` or ``new`` with a number of nodes (``old64``; 0:
the default schedule). Weights are dummies and accepted lengths imposed, so that both do the same work.
The engines of all modes are up at once; every other round asks them in the opposite order. Both checkouts
must be compiled; nothing of them need be installed: their entry points are read from their pyproject.toml.
Where git does not know their commits, DDTREE_OLD_COMMIT and DDTREE_COMMIT (of --new) say them.
A spread is half of what lies between the least and the most of the rounds, over the median.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.engines import Engine, all_up, llm_settings, modes
from bench.models import SHAPES, write_configs
from bench.plot import draw
from bench.records import Record, commit_of, package_version
from bench.steady import broken, steady

ROOT = Path(__file__).resolve().parents[1]
MODE = re.compile(r"none|chain|(old|new)(\d+)")
CONTEXT, MAX_TOKENS = 256, 160
Samples = dict[tuple[int, str], list[dict[str, Any]]]


class Checkout:
    """The package in a folder, its commit, and a folder with the metadata that an installer would write."""

    def __init__(self, folder: Path, site: Path, variable: str) -> None:
        """``site``: where to write the metadata; ``variable``: says the commit where git does not know it."""
        self.folder, self.site = folder.resolve(), site
        self.version = package_version(self.folder)
        if not self.version or not (self.folder / "pyproject.toml").exists():
            raise SystemExit(f"{folder} must be a checkout with vllm_ddtree/ and pyproject.toml; found none.")
        if not list(self.folder.glob("vllm_ddtree/_C*.so")):
            raise SystemExit(
                f"{folder} must be compiled; found no vllm_ddtree/_C*.so, without which its slow "
                "reference path would be measured. Run `python setup.py build_ext --inplace` there."
            )
        self.commit = commit_of(self.folder, variable)
        info = site / f"vllm_ddtree-{self.version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-ddtree\nVersion: {self.version}\n")
        groups = self.entry_points((self.folder / "pyproject.toml").read_text())
        (info / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in rows) for group, rows in groups.items()
            )
        )

    @staticmethod
    def entry_points(pyproject: str) -> dict[str, list[tuple[str, str]]]:
        """(name, target) by group. Python 3.10 has no TOML reader, and these tables need none."""
        tables = re.findall(r'^\[project\.entry-points\."([^"]+)"\]\n(.*?)(?=^\[|\Z)', pyproject, re.M | re.S)
        return {group: re.findall(r'^([\w.-]+) = "([^"]+)"', body, re.M) for group, body in tables}

    def path(self) -> list[Path]:
        """What goes first on an engine's PYTHONPATH."""
        return [self.site, self.folder]

    def said(self) -> dict[str, str]:
        """What the record says of it."""
        return {"folder": str(self.folder), "commit": self.commit, "version": self.version}


def main() -> None:
    """Start all engines, measure for so long, print the tables, write the record."""
    args = arguments()
    work = Path(tempfile.mkdtemp())
    code = {"new": Checkout(args.new, work / "new", "DDTREE_COMMIT")}
    if any(name.startswith("old") for name in args.modes):
        code["old"] = Checkout(args.old, work / "old", "DDTREE_OLD_COMMIT")
    said = {side: checkout.said() for side, checkout in code.items()}
    record = Record(args.out, args, code["new"].folder, checkouts=said)
    target, drafter = write_configs(work, args.shape)
    seqs = max(args.batches)
    common = llm_settings(str(target), 1600, seqs, 16384, args.kv_gib or SHAPES[args.shape].kv_gib)
    common |= {"load_format": "dummy", "skip_tokenizer_init": True}
    lengths = args.lengths or SHAPES[args.shape].lengths
    wanted = mode_settings(args.modes, str(drafter), seqs, lengths)
    paths = {name: code["old" if name.startswith("old") else "new"].path() for name in wanted}
    with all_up({name: common | extra for name, extra in wanted.items()}, args.out, paths) as engines:
        samples = measure(engines, args, record)
        print(*map(_line, cells(samples)), sep="\n")
        print(*map(_comparison, comparisons(samples)), sep="\n", flush=True)
        if args.steady:
            record.write(cells(samples) + _steady(engines, args), compared=comparisons(samples))
    draw(args.out)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or ``argv``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--old", type=Path, help="checkout of the modes that begin with old")
    parser.add_argument(
        "--new", type=Path, default=ROOT, help="checkout of the other modes; default: this one"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument(
        "--modes", nargs="+", default=["old0", "new0", "none", "chain"], help="none, chain, old64, new0, ..."
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 17, 32, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="start no round after this time")
    parser.add_argument("--lengths", type=float, nargs=2, metavar=("CHAIN", "TREE"), help="to impose")
    parser.add_argument("--kv-gib", type=float, help="cache of each engine; default: 10 for 8b, 2 for 135m")
    parser.add_argument(
        "--steady", action="store_true", help="count afterwards what new's warm trees wait for"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.modes if not MODE.fullmatch(name)]:
        parser.error(f"modes are none, chain, or old or new with nodes such as old64; found {unknown}")
    if args.old is None and any(name.startswith("old") for name in args.modes):
        parser.error("modes that begin with old need the checkout of --old")
    return args


def mode_settings(
    names: Sequence[str], drafter: str, seqs: int, lengths: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """LLM arguments of each mode, the same for old and new."""
    found = {}
    for name in names:
        which = MODE.fullmatch(name)
        assert which is not None
        nodes = int(which[2] or 0)
        tree = f"tree{nodes or ''}"
        found[name] = modes(drafter, [nodes], seqs, lengths)[tree if which[1] else name]
    return found


def measure(engines: dict[str, Engine], args: argparse.Namespace, record: Record) -> Samples:
    """What every engine answered, by batch and mode, round after round; the first one only warms up."""
    samples: Samples = {(batch, name): [] for batch in args.batches for name in engines}
    began = 0.0
    for round_ in itertools.count():
        if round_ == 1:
            began = time.monotonic()
        elif round_ > 1 and time.monotonic() - began > args.seconds:
            return samples
        for batch in args.batches:
            prompts = [[(i * 131 + j * 7) % 40_000 for j in range(CONTEXT)] for i in range(batch)]
            for name in list(engines) if round_ % 2 else reversed(engines):
                ask = {"prompts": prompts, "temperature": 0.0, "max_tokens": MAX_TOKENS}
                answer = engines[name].ask(**ask, want_stages=True)
                if round_:
                    samples[batch, name].append(answer)
        if round_:
            record.write(cells(samples), compared=comparisons(samples))
            print(f"round {round_} done after {time.monotonic() - began:.0f} s", flush=True)
    raise AssertionError


def cells(samples: Samples) -> list[dict[str, Any]]:
    """A cell per batch and mode."""
    return [cell(batch, name, rounds) for (batch, name), rounds in samples.items()]


def cell(batch: int, name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and their spreads; a round too short for a step's wall time has none."""
    stages = [answer["stages"] for answer in rounds]
    walls = [stage["wall_ms"] for stage in stages if stage["wall_ms"]]
    speeds = [answer["tokens"] / answer["seconds"] for answer in rounds]
    found = {
        "batch": batch,
        "context": CONTEXT,
        "mode": name,
        "rounds": len(rounds),
        "wall_ms": statistics.median(walls) if walls else None,
        "wall_spread": spread(walls) if walls else None,
        "tokens_per_second": statistics.median(speeds),
        "tokens_spread": spread(speeds),
        "accepted_length": statistics.median(answer["accepted_length"] for answer in rounds),
    }
    for side in ("gpu", "host"):
        names = dict.fromkeys(name for stage in stages for name in stage[f"{side}_ms"])
        times = {n: [stage[f"{side}_ms"][n] for stage in stages if n in stage[f"{side}_ms"]] for n in names}
        found[f"{side}_ms"] = {n: statistics.median(values) for n, values in times.items()}
        found[f"{side}_spread"] = {n: spread(values) for n, values in times.items()}
    return found


def spread(values: Sequence[float]) -> float:
    """Half of what lies between the least and the most, over the median."""
    return (max(values) - min(values)) / 2 / (statistics.median(values) or 1.0)


def comparisons(samples: Samples) -> list[dict[str, Any]]:
    """New over old for each batch and number of nodes that has both, from ratios within a round."""
    found = []
    for (batch, name), olds in samples.items():
        news = samples.get((batch, f"new{name[3:]}"))
        if not name.startswith("old") or news is None:
            continue
        pairs = list(zip(olds, news, strict=True))
        both = [(a["stages"]["wall_ms"], b["stages"]["wall_ms"]) for a, b in pairs]
        walls = [b / a for a, b in both if a and b]
        speeds = [b["tokens"] / b["seconds"] / (a["tokens"] / a["seconds"]) for a, b in pairs]
        found.append(
            {
                "batch": batch,
                "compared": f"new{name[3:]} / {name}",
                "rounds": len(pairs),
                "wall_ratio": statistics.median(walls) if walls else None,
                "wall_ratio_spread": spread(walls) if walls else None,
                "tokens_ratio": statistics.median(speeds),
                "tokens_ratio_spread": spread(speeds),
            }
        )
    return found


def _steady(engines: dict[str, Engine], args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name, engine in engines.items():
        if name.startswith("new"):
            counts = steady(engine, args.batches)
            found.append({"steady": name} | counts)
            print(f"{name}: {broken(counts) or 'no sync of ours, no compilation, no capture'}; {counts}")
            engine.profile(args.out.with_suffix(f".{name}.profile.txt"))
    return found


def _line(cell: dict[str, Any]) -> str:
    gpu, host = (" ".join(f"{k} {v:.3f}" for k, v in cell[side].items()) for side in ("gpu_ms", "host_ms"))
    return (
        f"b={cell['batch']:<3} {cell['mode']:>8} | "
        f"wall {cell['wall_ms'] or 0:7.3f} ms +-{cell['wall_spread'] or 0:.1%} | "
        f"{cell['tokens_per_second']:8.0f} tok/s +-{cell['tokens_spread']:.1%} | "
        f"len {cell['accepted_length']:.2f} | gpu {gpu} | host {host}"
    )


def _comparison(row: dict[str, Any]) -> str:
    return (
        f"b={row['batch']:<3} {row['compared']}: "
        f"wall {row['wall_ratio'] or 0:.3f} +-{row['wall_ratio_spread'] or 0:.1%}, "
        f"tokens/s {row['tokens_ratio']:.3f} +-{row['tokens_ratio_spread']:.1%}, {row['rounds']} rounds"
    )


if __name__ == "__main__":
    main()
