"""A picture of one run of `transfer.py`: bars of GB per processor second, by case and side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from .statistics import median, median_interval

# Sides as the run names them, from the bare calls to what is held against them, and their colours.
COLOURS = {
    "bare process_vm_readv": "#9db7d5",
    "process": "#1f5fa8",
    "bare socket": "#a9d3b5",
    "tcp": "#1e8048",
    "NIXL": "#d9822b",
    "NIXL, tcp": "#b5483a",
    "Mooncake, tcp": "#7a5a9e",
}
INK, GREY, PAPER = "#1c1c1c", "#8a8a8a", "#ffffff"
WIDTH, LABELS_END, BARS_END = 1500, 330, 1250
BAR, GAP, TOP = 22, 26, 92


def draw(run: dict[str, Any], path: Path) -> None:
    """`run` is what `transfer.py --json` writes."""
    cases: dict[str, dict[str, list[float]]] = {}
    for entry in run["found"]:
        if entry["side"] in COLOURS:
            rates = [entry["bytes"] / each["cpu_s"] / 1e9 for each in entry["rounds"]]
            cases.setdefault(entry["text"], {})[entry["side"]] = rates
    most = max(median_interval(rates)[1] for sides in cases.values() for rates in sides.values())
    height = TOP + sum(len(sides) * BAR + GAP for sides in cases.values()) + 10
    image = Image.new("RGB", (WIDTH, height), PAPER)
    pen = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(16), ImageFont.load_default(22)
    title = "GB per processor second of both processes (more is better)"
    pen.text((20, 16), title, INK, large)
    words = (
        f"{run['day']}, {run['machine']}; median of {run['rounds']} rounds and its 95 % interval"
    )
    pen.text(
        (20, 50), f"{words}; load average {run['load'][0]:.1f} to {run['load'][1]:.1f}", GREY, small
    )
    scale = (BARS_END - LABELS_END) / most
    y = TOP
    for text, sides in cases.items():
        lines = wrapped(text, LABELS_END - 40, small)
        for number, line in enumerate(lines):
            pen.text((20, y + number * 20), line, INK, small)
        for side in (side for side in COLOURS if side in sides):
            rates = sides[side]
            middle, (low, high) = median(rates), median_interval(rates)
            end = LABELS_END + middle * scale
            pen.rectangle((LABELS_END, y, end, y + BAR - 4), COLOURS[side])
            centre = y + BAR // 2 - 2
            whisker = (LABELS_END + low * scale, centre, LABELS_END + high * scale, centre)
            pen.line(whisker, INK, 2)
            after = max(end, whisker[2]) + 8
            pen.text((after, y - 1), f"{side}  {middle:.2f}", INK, small)
            y += BAR
        y += GAP
    image.save(path, optimize=True)


def wrapped(text: str, width: int, font: Any) -> list[str]:
    """Lines of at most so many points."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
