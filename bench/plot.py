"""Pictures of the benchmarks' JSON: what e2e.py, step.py and ab.py draw beside their results.

python bench/plot.py result.json        (writes result.png; needs matplotlib)
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

if not __package__:
    import _as_package  # noqa: F401  run as a file: its siblings are the package `bench`

from bench.records import read

COLOURS = {"none": "#666666", "chain": "#c44e52", "tree": ("#a6cbe3", "#5b9bc8", "#1f5f99", "#0b2f52")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    for path in parser.parse_args().results:
        draw(path)


def draw(path: Path) -> None:
    """Draw one result; says so when matplotlib is missing, since the numbers are what counts."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print(f"no picture: matplotlib is not installed here; run bench/plot.py {path} where it is")
        return
    cells = read(path)["cells"]
    if "gpu_ms" in cells[0]:
        figure = _stages(plt, cells)
    elif "tokens_per_second" in cells[0]:
        figure = _speeds(plt, cells)
    else:
        raise SystemExit(
            f"{path}: e2e, step and ab results have pictures; found cells of {sorted(cells[0])}."
        )
    figure.savefig(path.with_suffix(".png"), dpi=110, bbox_inches="tight")
    print(f"written: {path.with_suffix('.png')}")


def _colour(mode: str, modes: list[str]) -> Any:
    if not mode.startswith("tree"):
        return COLOURS[mode]
    trees = [m for m in modes if m.startswith("tree")]
    shades = COLOURS["tree"]
    return shades[1 + trees.index(mode)] if len(trees) < len(shades) else shades[trees.index(mode) % 4]


def _speeds(plt: Any, cells: list[dict[str, Any]]) -> Any:
    """Speed over no speculation by batch, one panel per prompt set and temperature; bars are the rounds."""
    cells = [cell for cell in cells if "batch" in cell]
    kinds = list(dict.fromkeys(cell["prompts"] for cell in cells))
    heats = list(dict.fromkeys(cell["temperature"] for cell in cells))
    figure, axes = plt.subplots(
        len(heats), len(kinds), figsize=(5.2 * len(kinds), 3.6 * len(heats)), squeeze=False, sharey="row"
    )
    for row, heat in enumerate(heats):
        for column, kind in enumerate(kinds):
            axis = axes[row][column]
            chosen = [c for c in cells if c["prompts"] == kind and c["temperature"] == heat]
            modes = list(chosen[0]["tokens_per_second"])
            places = range(len(chosen))
            for mode in modes[1:]:
                base = [statistics.median(c["tokens_per_second"]["none"]) for c in chosen]
                runs = [
                    [v / b for v in c["tokens_per_second"][mode]] for c, b in zip(chosen, base, strict=True)
                ]
                middle = [statistics.median(r) for r in runs]
                error = [
                    [m - min(r) for m, r in zip(middle, runs, strict=True)],
                    [max(r) - m for m, r in zip(middle, runs, strict=True)],
                ]
                axis.errorbar(
                    places, middle, error, marker="o", capsize=3, label=mode, color=_colour(mode, modes)
                )
            axis.axhline(1, color=COLOURS["none"], linewidth=1)
            axis.set_xticks(places, [c["batch"] for c in chosen])
            axis.set_title(f"{kind}, temperature {heat:g}")
            axis.set_xlabel("requests at once")
            if column == 0:
                axis.set_ylabel("tokens/s over no speculation")
            axis.set_ylim(bottom=0)
    axes[0][0].legend()
    figure.tight_layout()
    return figure


def _stages(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """GPU milliseconds of a step by stage, stacked, one panel per context and batch."""
    rows = [row for row in rows if "gpu_ms" in row]
    places = list(dict.fromkeys((row["context"], row["batch"]) for row in rows))
    figure, axes = plt.subplots(1, len(places), figsize=(3.1 * len(places), 3.8), squeeze=False)
    stages = {"verify": "#5b9bc8", "walk+commit": "#e3a857", "draft+build": "#7fb77e"}
    for axis, (context, batch) in zip(axes[0], places, strict=True):
        chosen = [row for row in rows if (row["context"], row["batch"]) == (context, batch)]
        bottom = [0.0] * len(chosen)
        for stage, colour in stages.items():
            height = [row["gpu_ms"].get(stage, 0.0) for row in chosen]
            axis.bar([row["mode"] for row in chosen], height, bottom=bottom, color=colour, label=stage)
            bottom = [a + b for a, b in zip(bottom, height, strict=True)]
        for i, row in enumerate(chosen):
            text = f"{row['speedup']:.2f}x" if "speedup" in row else f"{row['wall_ms'] or 0:.2f} ms"
            axis.text(i, bottom[i], text, ha="center", va="bottom", fontsize=8)
        axis.set_title(f"batch {batch}, context {context}", fontsize=9)
        axis.tick_params(axis="x", rotation=45)
        axis.margins(y=0.12)
    axes[0][0].set_ylabel("GPU ms per step (text: speed over none, or wall)")
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
