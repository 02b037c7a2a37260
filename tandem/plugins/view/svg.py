"""Curves as SVG: a panel a chart, a line a run or a name. Light and dark are the reader's.

It does not know where the numbers come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, GAP = 440, 254, 16
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 54
COLORS = ("#3b6fd4", "#d97706", "#0f9d76", "#c2417c", "#7c5cd6", "#6b8e23", "#0891b2", "#a16207")
# system-ui is a browser's; where the picture is drawn without one, the first that is there
FONTS = "system-ui,'DejaVu Sans','Liberation Sans','Noto Sans',Helvetica,Arial,sans-serif"
STYLE = """
.plot{font-size:11px;font-family:FONTS}
.plot text{fill:#5b6472}.plot .t{fill:#1c2330;font-weight:600;
font-size:13px}.plot .g{stroke:#e6e9ee}.plot .p{fill:none;stroke-width:1.6;stroke-linejoin:round}
@media (prefers-color-scheme:dark){.plot text{fill:#98a2b3}.plot .t{fill:#e6e9ef}
.plot .g{stroke:#2a313c}}
""".replace("FONTS", FONTS)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve: x rises, and all have the same length. half: of the interval around y, or none."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    half: Sequence[float] = ()

    def band(self) -> list[tuple[float, float]]:
        """Return the outline of the interval, there and back."""
        if not self.half:
            return []
        values = list(zip(self.x, self.y, self.half, strict=True))
        there, back = [(x, y + h) for x, y, h in values], [(x, y - h) for x, y, h in values]
        return there + back[::-1]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart with a title; its lines have points."""

    title: str
    lines: Sequence[Line]

    @property
    def is_constant(self) -> bool:
        """Tell whether all its values are one, and there is more than one step."""
        return len({y for one in self.lines for y in one.y}) == 1 < len(self.lines[0].y)


def figure(panels: Sequence[Panel]) -> str:
    """Draw panels, two in a row, as one SVG with its own style."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width, height = columns * (WIDTH + GAP), rows * (HEIGHT + GAP)
    parts = [
        f'<g transform="translate({place % columns * (WIDTH + GAP)},'
        f'{place // columns * (HEIGHT + GAP)})">{_panel(panel)}</g>'
        for place, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{STYLE}</style>{"".join(parts)}</svg>'
    )


def _panel(panel: Panel) -> str:
    xs = [x for line in panel.lines for x in line.x]
    ys = [y for line in panel.lines for y in (*line.y, *(at for _, at in line.band()))]
    parts = [f'<text class="t" x="{LEFT}" y="16">{escape(panel.title)}</text>']
    x_axis, y_axis = _Axis(xs, LEFT, WIDTH - RIGHT), _Axis(ys, HEIGHT - BOTTOM, TOP)
    for tick in y_axis.ticks:
        at = y_axis(tick)
        parts.append(f'<path class="g" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_axis.ticks:
        at = x_axis(tick)
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end">by step</text>')
    at, below = LEFT, HEIGHT - 31
    for place, line in enumerate(panel.lines):
        color = COLORS[place % len(COLORS)]
        points, outline = (
            " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in pairs)
            for pairs in (zip(line.x, line.y, strict=True), line.band())
        )
        if outline:
            parts.append(f'<polygon fill="{color}" opacity=".15" points="{outline}"/>')
        parts.append(f'<polyline class="p" stroke="{color}" points="{points}"/>')
        if len(line.x) == 1:
            parts.append(
                f'<circle cx="{x_axis(line.x[0]):.1f}" cy="{y_axis(line.y[0]):.1f}" r="2.5" '
                f'fill="{color}"/>'
            )
        label = line.label if len(line.label) <= 34 else f"...{line.label[-31:]}"
        label += f" {line.y[-1]:.4g}"
        if (end := at + 24 + 6 * len(label)) > WIDTH:
            at, below, end = LEFT, below + 14, end - at + LEFT
        parts.append(f'<rect x="{at}" y="{below}" width="9" height="9" fill="{color}"/>')
        parts.append(f'<text x="{at + 13}" y="{below + 8}">{escape(label)}</text>')
        at = end
    return "".join(parts)


class _Axis:
    """Values of an axis to places of the picture, and round numbers along it."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        low, high = min(values), max(values)
        if low == high:
            low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
        self._low, self._scale, self._start = low, (end - start) / (high - low), start
        rough = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        # the 1, 2 or 5 times a power of ten that is next above
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
        first = math.ceil(low / step)
        self.ticks = [n * step for n in range(first, math.floor(high / step) + 1)]

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._scale
