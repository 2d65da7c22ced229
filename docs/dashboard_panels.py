"""The panels of docs/dashboard.py: a picture on Grafana's grid, with what its dark theme makes of a panel's JSON."""

import io
import math
import re
import time
from itertools import groupby

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator

WIDTH, COLUMNS, ROW, GAP = 960, 24, 30, 8  # pixels; a panel of h rows is h * ROW + (h - 1) * GAP high
PAGE, PANEL, EDGE, TEXT, SOFT, GRID = "#111217", "#181b1f", "#2c3036", "#d8d9e2", "#9a9ba6", "#2a2d33"
CLASSIC = ["#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#705DA0", "#37872D", "#FADE2A"]
NAMED = {"green": "#73BF69", "red": "#F2495C"}
GRADE = LinearSegmentedColormap.from_list("continuous-GrYlRd", ["#73BF69", "#FADE2A", "#F2495C"])
STEPS_S = (10, 15, 30, 60, 120, 300, 600, 900)
UNITS = {
    "s": ((60, 1 / 60, "min"), (1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs")),
    "Bps": ((1e9, 1e-9, "GB/s"), (1e6, 1e-6, "MB/s"), (1e3, 1e-3, "kB/s"), (0, 1, "B/s")),
    "bytes": ((2**30, 2**-30, "GiB"), (2**20, 2**-20, "MiB"), (2**10, 2**-10, "KiB"), (0, 1, "B")),
    "short": ((1e6, 1e-6, "Mil"), (1e3, 1e-3, "K"), (0, 1, "")),
}


def text_of(value, unit):
    """As Grafana writes a value of this unit."""
    if not math.isfinite(value):
        return str(value)
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if value == 0:
        return "0"
    factor, name = next((factor, name) for least, factor, name in UNITS[unit] if abs(value) >= least)
    return f"{value * factor:.3g} {name}".strip()


def shortened(tag):
    """On one line, with tenths of pixels."""
    tenths = re.sub(r"\d+\.\d\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), tag)
    return re.sub(r"\s*\n\s*", " ", tenths)


def legend_of(labels, target):
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"]).strip()


def spells(points, end, least, most):
    """For as long as a series has one colour: that, its begin and its end. Without a value it has none."""
    ends = [at for at, _ in points[1:]] + [end]
    shares = [(value - least) / (most - least) for _, value in points]
    timed = [
        (to_hex(GRADE(share)) if math.isfinite(share) else None, at, end)
        for share, (at, _), end in zip(shares, points, ends, strict=True)
    ]
    for colour, same in groupby(timed, key=lambda own: own[0]):
        if colour is not None:
            same = list(same)
            yield colour, same[0][1], same[-1][2]


def passed(defaults, value):
    """The colour of the last threshold that the value has reached."""
    steps = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    return NAMED[steps[-1]["color"]]


class Picture:
    """Of ``rows`` rows of the grid, from ``start`` to ``end`` in seconds since 1970."""

    def __init__(self, rows, start, end):
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "straggle", "font.size": 11})
        mpl.rcParams.update({"font.family": "DejaVu Sans"})  # and what a reader has, in `save`
        self.height, self.start, self.end = rows * (ROW + GAP), start, end
        self.figure = Figure(figsize=(WIDTH / 72, self.height / 72), dpi=72, facecolor=PAGE)

    # -- places

    def width_of(self, place):
        column = (WIDTH - GAP) / COLUMNS
        return place["w"] * column - GAP

    def box(self, place):
        """Left, bottom, width and height in pixels, from the lower left corner."""
        top, high = place["y"] * (ROW + GAP), place["h"] * ROW + (place["h"] - 1) * GAP
        left = GAP + place["x"] * (WIDTH - GAP) / COLUMNS
        return left, self.height - top - high - GAP / 2, self.width_of(place), high

    def axes(self, left, bottom, width, height):
        axes = self.figure.add_axes((left / WIDTH, bottom / self.height, width / WIDTH, height / self.height))
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=SOFT, length=0, labelsize=10)
        axes.tick_params(axis="x", pad=6)
        return axes

    def write(self, x, y, text, **how):
        return self.figure.text(x / WIDTH, y / self.height, text, **{"color": TEXT, "parse_math": False, **how})

    # -- panels

    def add(self, panel, place, found):
        left, bottom, width, high = self.box(place)
        if panel["type"] == "row":
            self.write(left, bottom + 10, f"⌄ {panel['title']}", fontweight="bold")
            return
        style = {
            "zorder": -2,
            "boxstyle": "round,pad=0,rounding_size=3",
            "facecolor": PANEL,
            "edgecolor": EDGE,
            "linewidth": 1,
        }
        self.figure.add_artist(FancyBboxPatch((left, bottom), width, high, transform=None, **style))
        self.write(left + 10, bottom + high - 19, panel["title"], fontweight="bold")
        inside = left + 10, bottom + 8, width - 20, high - 36
        if not any(series for _, series in found):
            empty = panel["fieldConfig"]["defaults"].get("noValue", "No data")
            self.write(left + width / 2, bottom + high / 2 - 10, empty, color=SOFT, ha="center")
            return
        DRAW[panel["type"]](self, panel, found, inside)

    def lines(self, panel, found, inside):
        """Curves over time, or areas on one another, and a legend below."""
        left, bottom, width, high = inside
        drawn = [(legend_of(labels, target), points) for target, series in found for labels, points in series]
        used = self.legend([name for name, _ in drawn], inside)
        axes = self.axes(left + 52, bottom + used + 20, width - 56, high - used - 24)
        unit, custom = panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"]["custom"]
        below = {}  # what lies under the next area, by time
        stacked = custom.get("stacking", {}).get("mode") == "normal"
        for number, (_, points) in enumerate(drawn):
            colour = CLASSIC[number % len(CLASSIC)]
            times = [at - self.start for at, _ in points]
            values = [value if math.isfinite(value) else math.nan for _, value in points]
            if stacked:
                base = [below.get(at, 0.0) for at in times]
                values = [low + (0.0 if math.isnan(own) else own) for low, own in zip(base, values, strict=True)]
                axes.fill_between(times, base, values, color=colour, alpha=custom["fillOpacity"] / 100, linewidth=0)
                below.update(zip(times, values, strict=True))
            axes.plot(times, values, color=colour, linewidth=1.2)
        self.over_time(axes)
        drawn = [value for line in axes.lines for value in line.get_ydata() if math.isfinite(value)]
        axes.set_ylim(1.05 * min([0.0, *drawn]), 1.05 * max([0.0, *drawn]) or 1.0)
        self.upwards(axes, unit)

    def upwards(self, axes, unit):
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, unit)))

    def legend(self, names, inside):
        """Colours and names, in as many lines as they need; returns their height."""
        left, bottom, width, _ = inside
        lines, x = [[]], 0.0
        for number, name in enumerate(names):
            needs = 26 + 6 * len(name)
            if x + needs > width and lines[-1]:
                lines.append([])
                x = 0.0
            lines[-1].append((x, number, name))
            x += needs
        for up, line in enumerate(reversed(lines)):
            for x, number, name in line:
                y = bottom + 15 * up
                colour = CLASSIC[number % len(CLASSIC)]
                self.write(left + x, y, "▬", color=colour)
                self.write(left + x + 15, y, name, fontsize=10.5, color=TEXT)
        return 15 * len(lines) + 4

    def over_time(self, axes):
        span = self.end - self.start
        step = next((step for step in STEPS_S if span / step <= 6), 1800)
        ticks = list(range(math.ceil(self.start / step) * step, int(self.end) + 1, step))
        shape = "%H:%M" if step % 60 == 0 else "%H:%M:%S"
        axes.set_xlim(0, span)
        axes.set_xticks([at - self.start for at in ticks], [time.strftime(shape, time.gmtime(at)) for at in ticks])

    def rows(self, panel, found, inside):
        """One row for each series, coloured by its value."""
        left, bottom, width, high = inside
        ((target, series),) = found
        defaults = panel["fieldConfig"]["defaults"]
        axes = self.axes(left + 52, bottom + 20, width - 56, high - 24)
        for row, (_, points) in enumerate(series):
            for colour, begin, end in spells(points, self.end, defaults["min"], defaults["max"]):
                axes.barh(row, end - begin, 0.8, begin - self.start, color=colour, edgecolor=colour, linewidth=0.3)
        axes.set_yticks(range(len(series)), [legend_of(labels, target) for labels, _ in series])
        axes.set_ylim(len(series) - 0.5, -0.5)
        self.over_time(axes)

    def number(self, panel, found, inside):
        """The last value of each series, above its course."""
        left, bottom, width, high = inside
        ((_, series),) = found
        defaults, each = panel["fieldConfig"]["defaults"], width / len(series)
        for column, (_, points) in enumerate(series):
            known = [(at, value) for at, value in points if math.isfinite(value)]
            last = known[-1][1] if known else points[-1][1]
            colour, middle = passed(defaults, last), left + each * (column + 0.5)
            text = text_of(last, defaults["unit"])
            self.write(middle, bottom + high / 2 - 2, text, color=colour, fontsize=24, ha="center", fontweight="bold")
            axes = self.axes(left + each * column - 9, bottom - 7, each + 18, high * 0.4)
            axes.fill_between(
                [at for at, _ in known], [value for _, value in known], color=colour, alpha=0.25, linewidth=0
            )
            axes.plot([at for at, _ in known], [value for _, value in known], color=colour, linewidth=1)
            axes.set_axis_off()

    def bars(self, panel, found, inside):
        """The last value of each series as a bar, by name."""
        left, bottom, width, high = inside
        ((target, series),) = found
        unit = panel["fieldConfig"]["defaults"]["unit"]
        most = max(points[-1][1] for _, points in series) or 1.0
        each = high / len(series)
        for row, (labels, points) in enumerate(series):
            value, y = points[-1][1], bottom + high - each * (row + 1)
            bar = max(2.0, (width - 70) * value / most)
            self.write(left, y + each - 13, legend_of(labels, target), fontsize=10.5, color=SOFT)
            box = FancyBboxPatch((left, y + 4), bar, max(4, each - 22), transform=None, boxstyle="square,pad=0")
            box.set(zorder=-1, facecolor=passed(panel["fieldConfig"]["defaults"], value), edgecolor="none")
            self.figure.add_artist(box)
            self.write(left + width, y + 4 + (each - 22) / 2 - 4, text_of(value, unit), ha="right")

    def stacks(self, panel, found, inside):
        """For each value of a label one bar of all targets."""
        left, bottom, width, high = inside
        (field,) = (own["options"]["byField"] for own in panel["transformations"] if own["id"] == "joinByField")
        names = self.renamed(panel)
        used = self.legend([names[f"Value #{target['refId']}"] for target, _ in found], inside)
        axes = self.axes(left + 52, bottom + used + 20, width - 56, high - used - 24)
        keys = sorted({labels[field] for _, series in found for labels, _ in series})
        base = dict.fromkeys(keys, 0.0)
        for number, (_, series) in enumerate(found):
            for labels, points in series:
                key, value = labels[field], points[-1][1]
                axes.bar(keys.index(key), value, 0.7, base[key], color=CLASSIC[number], alpha=0.85, linewidth=0)
                base[key] += value
        axes.set_xticks(range(len(keys)), keys)
        self.upwards(axes, panel["fieldConfig"]["defaults"]["unit"])

    def renamed(self, panel):
        return next(own["options"]["renameByName"] for own in panel["transformations"] if own["id"] == "organize")

    def table(self, panel, found, inside):
        """A line for each series, and a column for each of its labels that is not left out."""
        left, bottom, _, high = inside
        ((_, series),) = found
        (options,) = (own["options"] for own in panel["transformations"] if own["id"] == "organize")
        columns = sorted(options["indexByName"], key=options["indexByName"].__getitem__)
        of = {
            own["matcher"]["options"]: {p["id"]: p["value"] for p in own["properties"]}
            for own in panel["fieldConfig"]["overrides"]
        }
        x = left
        for column in columns:
            name = options["renameByName"].get(column, column)
            self.write(x, bottom + high - 14, name, fontsize=10.5, color="#6e9fff")
            for row, (labels, points) in enumerate(series):
                text, colour = labels.get(column, ""), TEXT
                if column == "Value":
                    (mapping,) = of[name]["mappings"]
                    shown = mapping["options"][f"{points[-1][1]:.0f}"]
                    text, colour = shown["text"], NAMED[shown["color"]]
                self.write(x, bottom + high - 36 - 20 * row, text, color=colour)
            x += of.get(name, {}).get("custom.width", 0)

    def save(self, path, title):
        """As SVG, with what would repeat for each text once, and tenths of pixels."""
        text = io.StringIO()
        self.figure.savefig(text, format="svg", metadata={"Title": title, "Date": None}, facecolor=PAGE)
        drawn = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
        drawn = re.sub(r'(width|height)="(\d+)pt"', r'\1="\2"', drawn)
        drawn = re.sub(r"<[^>]+>", lambda tag: shortened(tag[0]), drawn)
        drawn = re.sub(r"font-family: [^;\"]*;? ?|stroke-linecap: square|(?<=[LM]) ", "", drawn)
        drawn = re.sub(r' transform="rotate\([^"]*\)"', "", drawn)
        font = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
        path.write_text(re.sub(r"\s*\n\s*", "\n", drawn.replace("<svg ", f'<svg font-family="{font}" ', 1)))


DRAW = {
    "timeseries": Picture.lines,
    "state-timeline": Picture.rows,
    "stat": Picture.number,
    "bargauge": Picture.bars,
    "barchart": Picture.stacks,
    "table": Picture.table,
}
