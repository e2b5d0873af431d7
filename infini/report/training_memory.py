"""The figure of the memory that longer training sequences need, from records of `infini bench suite=lengths`."""

from __future__ import annotations

from pathlib import Path

from infini.records import RunRecord
from infini.report.figures import LINES, paper_style, save


def draw_training_memory(run: RunRecord, folder: Path) -> list[Path]:
    """Draw, by sequence length, peak memory and seconds of a training step: with all activations kept (filled marks),
    and with those of one group of segments at a time (open marks).

    Returns:
        Paths of the PNG and the SVG.
    """
    measured = run.series["training_lengths"]
    N, group = measured["segment_length"], measured["group"]
    with paper_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        memory, time = figure.subplots(1, 2)
        for index, (name, ways) in enumerate(measured["models"].items()):
            style, marker, shade = LINES[index % len(LINES)]
            for way, title in (("all", "all kept"), ("grouped", f"{group} segments kept")):
                lengths = sorted(map(int, ways[way]))
                tokens = [length * N for length in lengths]
                face = shade if way == "all" else "white"
                drawn = {"linestyle": style, "marker": marker, "color": shade, "markersize": 4, "linewidth": 1.2}
                found = [ways[way][str(length)] for length in lengths]
                label = f"{name}, {title}"
                memory.plot(
                    tokens, [one["peak_bytes"] / 2**20 for one in found], label=label, markerfacecolor=face, **drawn
                )
                time.plot(tokens, [one["seconds"] for one in found], label=label, markerfacecolor=face, **drawn)
        for axes, label in ((memory, "peak memory above the model, MB"), (time, "a training step, seconds")):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
            axes.set_xlabel("tokens of a training sequence")
            axes.set_ylabel(label)
        memory.legend(frameon=False, fontsize=7)
        batch = f"{measured['batch_size']} sequences of segments of {N}"
        figure.suptitle(f"Training on longer sequences, scale {run.scale}, {batch}", fontsize=9)
        return save(figure, folder / f"training_memory_{run.scale}")
