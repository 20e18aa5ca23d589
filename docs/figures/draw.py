"""Draw all figures: `python docs/figures/draw.py`."""

from pathlib import Path

import all_reduce
import all_reduce_time
import asynchronous
import noise_scale
import pipeline
import ring
import sharding

DOCS = Path(__file__).resolve().parents[1]
FIGURES = {
    "tutorial/all-reduce.svg": all_reduce,
    "explanation/all-reduce-time.svg": all_reduce_time,
    "explanation/asynchronous.svg": asynchronous,
    "explanation/noise-scale.svg": noise_scale,
    "explanation/pipeline.svg": pipeline,
    "explanation/ring.svg": ring,
    "explanation/sharding.svg": sharding,
}
"""Modules with a function `figure`, by the files that they draw."""

if __name__ == "__main__":
    for file, module in FIGURES.items():
        (DOCS / file).write_text(module.figure())
