"""A report as an image: the headline, and the error and cost of every row as bars."""

import textwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residua.hosts import Report
from residua.hosts.report.table import headline, other_warnings, rows_shown

WIDTH, MARGIN, LINE = 960, 28, 26
PAPER, INK, QUIET, RULE, BLUE, RED = "#14161c", "#e9ebf1", "#98a1b3", "#2d3240", "#7d9ff5", "#ec8a6d"


def report_picture(report: Report | None, text: str) -> Tensor:
    """The picture [1, height, width, 3] with values from 0 to 1, as ComfyUI's IMAGE.

    Args:
        report: What to draw; None draws `text` alone.
        text: Shown instead of a headline.
    """
    from PIL import Image, ImageDraw, ImageFont

    large, small = ImageFont.load_default(19), ImageFont.load_default(15)
    said = headline(report) if report is not None else text
    lines = [(line, large, INK) for line in textwrap.wrap(said, 84)]
    for warning in other_warnings(report) if report is not None else []:
        lines += [(line, small, RED) for line in textwrap.wrap(f"warning: {warning}", 108)]
    rows = [row for item in report.transformers for row in rows_shown(report, item)[0]] if report is not None else []
    height = 2 * MARGIN + LINE * (len(lines) + (len(rows) + 2 if rows else 0))
    image = Image.new("RGB", (WIDTH, height), PAPER)
    draw = ImageDraw.Draw(image)
    y = MARGIN
    for line, font, colour in lines:
        draw.text((MARGIN, y), line, font=font, fill=colour)
        y += LINE
    if rows:
        _bars(draw, rows, y + LINE // 2, small)
    return torch.from_numpy(np.asarray(image).astype(np.float32) / 255.0)[None]


def _bars(draw: Any, rows: list[Any], y: int, font: Any) -> None:
    columns = {"error": (250, RED), "cost": (600, BLUE)}
    for title, (x, _) in columns.items():
        draw.text((x, y), f"estimated {title}" if title == "error" else title, font=font, fill=QUIET)
    longest = max((row.error for row in rows if row.error is not None), default=0.0) or 1.0
    for row in rows:
        y += LINE
        draw.line((MARGIN, y - 3, WIDTH - MARGIN, y - 3), fill=RULE)
        draw.text((MARGIN, y), row.name[:30], font=font, fill=INK)
        for title, (x, colour) in columns.items():
            value = getattr(row, title)
            if value is None:
                draw.text((x, y), "dense", font=font, fill=QUIET)
                continue
            share = value / longest if title == "error" else min(1.0, value)
            draw.rectangle((x, y + 5, x + max(2, int(200 * share)), y + 14), fill=colour)
            shown = f"{value:.1e}" if title == "error" else f"{value:.1%}"
            draw.text((x + 210, y), shown, font=font, fill=INK)
