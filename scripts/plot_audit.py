#!/usr/bin/env python3
"""Draws what `sparsemla audit --json FILE` wrote.

  rows       one file: how large the coherent error of an output row is, for each pipeline and order: the histogram over
             rows, and rms, p99 and max, against what rounding the exact output once would give
  gradients  several files (one for each beta): the error of dq against how peaked the attention is, a line for each
             pipeline, residual and operands; the worst of the orders where there are several

The kind follows from the number of files; --kind forces it. Needs matplotlib. Exit code 2 and one line on stderr for a
file or option that cannot be used.
"""

import argparse
import json
import math
import sys
from pathlib import Path

COLORS = {"lazy": "#D55E00", "exact": "#0072B2", "canonical": "#009E73", "candidate": "#CC79A7"}
SPARE_COLORS = ("#56B4E9", "#E69F00", "#7F3C8D", "#666666", "#A5AA00")
ORDER_DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
OUTPUT_FORMATS = (".png", ".svg", ".pdf")
BF16_ROUNDING = 1.66e-3  # relative L2 of rounding a tensor once to bf16
GREY = "#555555"
LOWEST_WEIGHT = 3e-4  # the weight axis, a logit scale, shows weights below it, and above 1 minus it, there
WEIGHT_TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
P99_MARK = {"marker": "_", "markersize": 14, "markeredgewidth": 2, "linestyle": "none"}
MAX_MARK = {"marker": "x", "markersize": 6, "markeredgewidth": 2, "linestyle": "none"}


class UsageError(Exception):
    """Message is the one line for stderr."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="AUDIT.json")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--kind", choices=("rows", "gradients"))
    parser.add_argument("--pipelines", help="draw only these, separated by commas")
    parser.add_argument("--title", help="instead of one made from the setup")
    parser.error = lambda message: sys.exit(reject(message))
    return parser.parse_args()


def reject(message):
    print("plot_audit.py: " + " ".join(str(message).split()), file=sys.stderr)
    return 2


def load(path):
    try:
        audit = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from None
    if not isinstance(audit, dict) or not isinstance(audit.get("setup"), dict):
        raise UsageError(f"{path}: found no \"setup\", want a file that `sparsemla audit --json` wrote")
    return audit


def entries(audit, section, path, pipelines):
    """The section's entries, only those of `pipelines` if given. A section must be there and not be empty."""
    found = audit.get(section)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UsageError(f"{path}: \"{section}\": found no list of objects, want one")
    chosen = [entry for entry in found if pipelines is None or entry.get("pipeline") in pipelines]
    if not chosen:
        has = ", ".join(sorted({str(entry.get("pipeline")) for entry in found})) or "no entry"
        hint = " (audit with --gradients)" if section == "gradients" and not found else ""
        raise UsageError(f"{path}: \"{section}\": found {has}, want at least one entry to draw{hint}")
    return chosen


def number(entry, key, path):
    """A finite number, or None where the audit wrote null (no such tensor, or not finite)."""
    value = entry.get(key, None)
    if key not in entry or not (value is None or isinstance(value, (int, float)) and not isinstance(value, bool)):
        raise UsageError(f"{path}: \"{key}\": found {value if key in entry else 'nothing'}, want a number")
    return value


def color_of(pipeline, known):
    """The same color for a pipeline in every panel; `known` collects the names in order of appearance."""
    known.setdefault(pipeline, COLORS.get(pipeline) or SPARE_COLORS[len(known) % len(SPARE_COLORS)])
    return known[pipeline]


def sizes_of(setup):
    return (f"{setup.get('tokens')} tokens, {setup.get('keys')} keys, top-{setup.get('topk')}, "
            f"{setup.get('heads')} heads")


def setup_line(setup):
    parts = [sizes_of(setup)]
    if setup.get("beta") is not None:
        parts.append(f"beta {setup['beta']:g}")
    if setup.get("self_weight_median") is not None:
        parts.append(f"dominant weight median {setup['self_weight_median']:.2f}")
    if setup.get("backend"):
        parts.append(str(setup["backend"]))
    return parts[0] + ("\n" if len(parts) > 1 else "") + " · ".join(parts[1:])


def tidy(axes):
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def draw_histogram(axes, forward, colors, dashes, path):
    """Share of rows in each bin of |row gain|. Entries without a histogram are left out."""
    drawn = False
    for entry in forward:
        histogram = entry.get("row_gain_histogram")
        if not histogram:
            continue
        edges, counts = histogram.get("edges", []), histogram.get("counts", [])
        if len(edges) != len(counts) + 1 or not sum(counts):
            raise UsageError(f"{path}: \"row_gain_histogram\": found {len(edges)} edges and {len(counts)} counts, want "
                             "one edge more than counts, and a count above 0")
        shares = [100 * count / sum(counts) for count in counts]
        color = color_of(entry["pipeline"], colors)
        axes.stairs(shares, edges, color=color, linewidth=1.8, linestyle=dashes[entry["order"]],
                    label=f"{entry['pipeline']}, dominant {entry['order']}" if entry["order"] in ("first", "last")
                    else f"{entry['pipeline']}, {entry['order']}")
        axes.stairs(shares, edges, fill=True, color=color, alpha=0.08)
        drawn = True
    return drawn


def crop_to_counts(axes, forward):
    """x limits: from where all but 0.5 % of the rows begin, so that a nearly empty tail of tiny gains takes no room."""
    low, high = math.inf, 0.0
    for entry in forward:
        histogram = entry.get("row_gain_histogram") or {"edges": [], "counts": []}
        total, seen, started = sum(histogram["counts"]), 0, False
        for index, count in enumerate(histogram["counts"]):
            seen += count
            if not started and seen > 5e-3 * total:
                low, started = min(low, histogram["edges"][index]), True
            if count:
                high = max(high, histogram["edges"][index + 1])
    axes.set_xscale("log")
    axes.set_xlim(low, high * 1.25)


def draw_bars(axes, forward, colors, path):
    """rms as a bar, p99 and max as marks above it; log scale."""
    positions, labels = [], []
    for entry in forward:
        gap = 0.6 if positions and entry["pipeline"] != forward[len(positions) - 1]["pipeline"] else 0.0
        positions.append((positions[-1] + 1 + gap) if positions else 0.0)
        labels.append(f"{entry['pipeline']}\n{entry['order']}")
    lowest, highest = math.inf, 0.0
    for position, entry in zip(positions, forward):
        color = color_of(entry["pipeline"], colors)
        rms, p99, largest = (number(entry, f"row_gain_{name}", path) for name in ("rms", "p99", "max"))
        if rms is None:
            axes.annotate("not finite", (position, 0.02), xycoords=("data", "axes fraction"), ha="center", rotation=90)
            continue
        axes.bar(position, rms, width=0.7, color=color, alpha=0.85)
        axes.annotate(f"{rms:.2e}", (position, rms), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
        for value, marker in ((p99, P99_MARK), (largest, MAX_MARK)):
            if value is not None:
                axes.plot(position, value, color=color, **marker)
        lowest, highest = min(lowest, rms), max(highest, rms, p99 or 0.0, largest or 0.0)
    for marker, name in ((P99_MARK, "99th percentile"), (MAX_MARK, "largest row")):
        axes.plot([], [], color=GREY, label=name, **marker)
    axes.set_yscale("log")
    if highest > 0:
        axes.set_ylim(max(lowest, 1e-12) / 4, highest * 6)  # room for the legend
    axes.set_xticks(positions, labels)


def plot_rows(plt, audit, path, arguments):
    forward = entries(audit, "forward", path, arguments.pipelines)
    for entry in forward:
        if not isinstance(entry.get("pipeline"), str) or not isinstance(entry.get("order"), str):
            raise UsageError(f"{path}: \"forward\": found an entry without pipeline or order, want both")
    floor = number(audit.get("floors", {}), "row_gain_rms", path)
    colors, orders = {}, list(dict.fromkeys(entry["order"] for entry in forward))
    dashes = {order: ORDER_DASHES[index % len(ORDER_DASHES)] for index, order in enumerate(orders)}
    has_histogram = any(entry.get("row_gain_histogram") for entry in forward)

    width = max(7.0, 1.0 * len(forward) + 2.0)
    figure, panels = plt.subplots(2 if has_histogram else 1, 1, figsize=(width, 8.2 if has_histogram else 4.6),
                                  squeeze=False, layout="constrained")
    bars = panels[-1][0]
    draw_bars(bars, forward, colors, path)
    bars.set_ylabel("|row gain error|")
    bars.set_title("rms over rows (bars), with its value", loc="left", fontsize=10)
    if floor is not None:
        bars.axhline(floor, color=GREY, linewidth=1.2, linestyle=(0, (2, 2)), label=f"rounding once: {floor:.2e}")
    bars.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
    tidy(bars)
    if has_histogram:
        axes = panels[0][0]
        draw_histogram(axes, forward, colors, dashes, path)
        crop_to_counts(axes, forward)
        if floor is not None:
            axes.axvline(floor, color=GREY, linewidth=1.2, linestyle=(0, (2, 2)), label="rms of rounding once")
        axes.set_xlabel("|row gain error|: the part of a row's error that scales the whole row")
        axes.set_ylabel("rows per bin, %")
        axes.set_title("Distribution over (token, head) rows", loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        tidy(axes)
    figure.suptitle(arguments.title or setup_line(audit["setup"]), fontsize=11)
    return figure


def gradient_lines(audits, metric, pipelines):
    """(pipeline, residual, operands, dq's dtype) -> {peakedness: worst error over the orders}, as they appear."""
    lines = {}
    for path, audit in audits:
        peakedness = number(audit["setup"], "self_weight_median", path)
        if peakedness is None:
            raise UsageError(f"{path}: \"self_weight_median\": found null, want a number")
        for entry in entries(audit, "gradients", path, pipelines):
            key = (str(entry.get("pipeline")), entry.get("residual"), entry.get("operands"), entry.get("dq_dtype"))
            error = number(entry, metric, path)
            if error is not None and error > 0:
                line = lines.setdefault(key, {})
                line[peakedness] = max(error, line.get(peakedness, 0.0))
    return lines


def line_label(pipeline, residual, operands, dq_dtype):
    parts = [pipeline]
    if residual is not None:
        parts.append("residual" if residual else "no residual")
    if operands is not None:
        parts.append("split P and dS" if operands == "split" else "bf16 P and dS")
    if dq_dtype == "fp32":
        parts.append("fp32 dq")
    return ", ".join(parts)


def plot_gradients(plt, audits, arguments):
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    metrics = [("dq_latent_rel_l2", "dq_latent"), ("dq_rope_rel_l2", "dq_rope")]
    panels_data = [(name, gradient_lines(audits, metric, arguments.pipelines)) for metric, name in metrics]
    panels_data = [(name, lines) for name, lines in panels_data if lines]
    if not panels_data:
        raise UsageError(f"{audits[0][0]}: \"gradients\": found no finite error of dq in any file, want one")
    figure, panels = plt.subplots(1, len(panels_data), figsize=(5.2 * len(panels_data) + 0.4, 5.6), squeeze=False,
                                  sharey=True, layout="constrained")
    colors = {}
    known = list(dict.fromkeys(key[0] for _, lines in panels_data for key in lines))
    for axes, (name, lines) in zip(panels[0], panels_data):
        for (pipeline, residual, operands, dq_dtype), points in lines.items():
            weights = sorted(points)
            above = len(known) - 1 - known.index(pipeline)  # the first is drawn widest, so that it shows under others
            axes.plot([min(max(weight, LOWEST_WEIGHT), 1 - LOWEST_WEIGHT) for weight in weights],
                      [100 * points[weight] for weight in weights], color=color_of(pipeline, colors),
                      linewidth=1.6 + 1.8 * above, linestyle=(0, (1, 1.5)) if residual is False else "solid",
                      markersize=5.5 + 2.5 * above, marker="s" if operands == "split" else "o",
                      markerfacecolor="white" if operands == "split" else None,
                      label=line_label(pipeline, residual, operands, dq_dtype))
        axes.axhline(100 * BF16_ROUNDING, color=GREY, linewidth=1.2, linestyle=(0, (2, 2)), label="one bf16 rounding")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("weight of the dominant key, median over rows")
        axes.set_xscale("logit")
        axes.xaxis.set_major_locator(FixedLocator(WEIGHT_TICKS))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        tidy(axes)
    panels[0][0].set_ylabel("relative L2 error, %")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    setup = audits[0][1]["setup"]
    several_orders = len({entry.get("order") for _, audit in audits for entry in audit["gradients"]}) > 1
    worst = " · worst of the orders" if several_orders else ""
    figure.suptitle(arguments.title or f"Error of dq against peakedness · {sizes_of(setup)}{worst}", fontsize=11)
    return figure


def draw(arguments):
    if arguments.output.suffix.lower() not in OUTPUT_FORMATS:
        raise UsageError(f"--output: found {arguments.output.name}, want a name ending in {', '.join(OUTPUT_FORMATS)}")
    arguments.pipelines = set(arguments.pipelines.split(",")) if arguments.pipelines else None
    kind = arguments.kind or ("rows" if len(arguments.files) == 1 else "gradients")
    if kind == "rows" and len(arguments.files) > 1:
        raise UsageError(f"--kind rows: found {len(arguments.files)} files, want one")
    audits = [(path, load(path)) for path in arguments.files]
    try:
        import matplotlib
    except ImportError:
        raise UsageError("matplotlib: found no such package, want it installed (pip install matplotlib)") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sparsemla"  # the same input gives the same file
    figure = plot_rows(plt, audits[0][1], audits[0][0], arguments) if kind == "rows" else plot_gradients(
        plt, audits, arguments)
    metadata = {"Date": None} if arguments.output.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(arguments.output, dpi=150, metadata=metadata)
    except OSError as error:
        raise UsageError(f"--output: {arguments.output}: {error.strerror}") from None


def main():
    try:
        draw(parse_arguments())
    except UsageError as error:
        return reject(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
