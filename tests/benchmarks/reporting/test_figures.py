"""Figures of a report, as the SVG that a reader sees."""

from __future__ import annotations

import re

from allstep.benchmarks.reporting.figures import bars


def test_bars_have_their_values_without_exponents():
    svg = bars("Peak memory", ["small", "large"], [12.345, 1234.5], x_label="MiB").svg
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"12.3", "1,234", "small", "large", "MiB"} <= set(texts)
