"""Made-up results of every kind that a report reads, in the format of the programs' files."""

from __future__ import annotations

import json
from pathlib import Path

from compared import SETTINGS

from allstep.common.files.strict_json import to_json

HOSTILE = '<script>alert("x")</script> | `$HOME` & $x$'


def statistics(middle: float) -> dict:
    low, high = middle * 0.98, middle * 1.02
    return {"num": 5, "median": middle, "mean": middle, "low": low, "high": high, "stdev": 1.0, "min": low, "max": high}


def cell(framework: str, strategy: str, ranks: int, rate: float | None, workload: str = "synthetic-weak") -> dict:
    """Return a cell as in compare.json; a cell without a rate has failed."""
    real, alone = workload.startswith("real"), {"pytorch": 900.0, "tensorflow": 1200.0}[framework]
    curve = [
        {
            "epoch": e,
            "seconds": 2.0 * e,
            "train_loss": 2 / e,
            "validation_loss": 2 / e,
            "validation_accuracy": 1 - 0.5 / e,
        }
        for e in range(1, 6)
    ]
    efficiency = {"single_process": statistics((rate or 0) / alone / ranks), "independent": statistics(0.9)}
    if (framework, strategy, ranks) == ("tensorflow", "horovod", 2):
        efficiency["first_framework"] = statistics(1.346)
    return {
        "id": f"{workload}.{framework}.{strategy}.{ranks}.cnn.64.float32",
        "workload": workload,
        "framework": framework,
        "strategy": strategy,
        "ranks": ranks,
        "model": "cnn",
        "batch_size": 64,
        "precision": "float32",
        "status": "ok" if rate else "failed",
        "reason": None if rate else f"rank 1 stopped: {HOSTILE}",
        "samples": [],
        "target_accuracy": 0.9 if real else None,
        "gate": {"status": "passed", "reason": None},
        "comparable": bool(rate),
        "command": f"horovodrun -np {ranks} python -m allstep.commands.compare.synthetic --token=hunter2",
        "images_per_second": statistics(rate) if rate else None,
        "startup_seconds": None if real else statistics(4.0),
        "seconds_to_target": statistics(6.0) if real else None,
        "final_accuracy": 0.9 if real else None,
        "peak_memory_bytes_by_rank": [300 * 2**20] * ranks if rate else None,
        "efficiency": efficiency if rate else None,
        "against": {},
        "curve": curve if real else None,
    }


def compare_result() -> dict:
    """Return the content of a compare.json."""
    rates = {"pytorch": (900.0, 1700.0, 1560.0), "tensorflow": (1200.0, 2280.0, 2100.0)}
    cells = []
    for workload in ("synthetic-weak", "real-weak"):
        for framework, (one, limit, horovod) in rates.items():
            cells += [
                cell(framework, "independent", 1, one, workload),
                cell(framework, "independent", 2, limit, workload),
            ]
            cells += [
                cell(framework, "horovod", 1, 0.98 * one, workload),
                cell(framework, "horovod", 2, horovod, workload),
            ]
        cells += [cell("pytorch", "ddp", 1, 880.0, workload), cell("pytorch", "ddp", 2, None, workload)]
    return {
        "format": "allstep-compare",
        "version": 2,
        "created": "2026-11-20T16:00:00+00:00",
        "updated": "2026-11-20T17:00:00+00:00",
        "settings": to_json(SETTINGS),
        "num_rounds": 5,
        "finished": False,
        "command": "allstep compare --ranks 1,2",
        "rules": ["Warm-up is not counted.", "The slowest rank counts."],
        "environment": {
            "versions": {"torch": "2.14.1"},
            "git": {"commit": "0" * 40, "modified": False},
            "hostname": "host",
            "os": "Linux 6",
            "processor": {"name": HOSTILE, "num_cores": 2, "num_cpus": 2, "governor": None},
            "memory_bytes": 2**33,
            "load_average": [0.1, 0.1, 0.1],
            "gpus": [],
            "gpu_topology": None,
            "launcher": "horovodrun",
            "variables": {"HOROVOD_SECRET_KEY": "hunter2", "http_proxy": "http://me:hunter2@proxy:80"},
            "threads_per_rank": 1,
        },
        "cells": cells,
    }


def collectives_result() -> dict:
    rows = []
    for backend, collective in (("memcpy", "copy"), ("mpi4py", "all-reduce"), ("horovod-torch", "all-reduce")):
        for size in (8, 2**20, 2**26):
            seconds = dict.fromkeys(("minimum", "average", "maximum"), 1e-5 + size / 3e9)
            bandwidth = size / seconds["average"]
            rows.append(
                {"backend": backend, "collective": collective, "bytes": size, "seconds": seconds, "right": True}
                | {"median_seconds": 2 * seconds["average"]}
                | {"algorithm_bandwidth": bandwidth, "bus_bandwidth": bandwidth}
            )
    over = [{"backend": "horovod-torch", "bytes": 8, "ratio": 0.87, "ratio_of_medians": 0.63}]
    return {
        "format": "allstep-collectives", "version": 2, "command": "allstep collectives", "ranks": 2, "rows": rows,
        "horovod_over_mpi": over,
        "failures": {"torch-gloo": "no torchrun"}, "missing": {"tf-distribute": ["broadcast"]}, "variables": {},
    }  # fmt: skip


START = {"event": "start", "framework": "pytorch", "strategy": "horovod", "launcher": "horovodrun", "world_size": 2}
START |= {"global_batch_size": 64}
EPOCHS = [
    {"event": "epoch", "epoch": e, "train_loss": 1 / e, "validation_accuracy": 0.9, "cumulative_seconds": 3.0 * e}
    for e in (1, 2, 3)
]


def validation_result() -> dict:
    """Return the output of `allstep forecast --validate`: a row within 5 points and one outside."""
    row = {"title": "own runs, pytorch", "system": "horovod", "network": "cnn", "baseline_ranks": 1, "estimated": ""}
    rows = [
        {**row, "num_ranks": 2, "measured": 0.9, "forecast": 0.923, "error": 0.023, "within": True},
        {**row, "num_ranks": 4, "measured": 0.4, "forecast": 0.471, "error": 0.071, "within": False},
    ]
    content = {"command": "allstep forecast --validate", "largest_error": 0.05, "rows": rows, "notes": ["Told so."]}
    return {"format": "allstep-validation", "version": 1, **content}


def write_run(directory: Path) -> None:
    """Write a trainer's output directory; the last line is half-written."""
    directory.mkdir(parents=True)
    events = [START, *EPOCHS]
    lines_ = [json.dumps(event) for event in events] + ['{"event": "end", "peak_mem']
    (directory / "metrics.jsonl").write_text("\n".join(lines_))
    (directory / "config.yaml").write_text("strategy: horovod\n")


def write_results(directory: Path) -> None:
    """Write a result of every kind."""
    (directory / "compare").mkdir()
    (directory / "compare" / "compare.json").write_text(json.dumps(compare_result()))
    (directory / "collectives.json").write_text(json.dumps(collectives_result()))
    figure = {"what": HOSTILE, "ours": 1.0, "reference": 2.0, "ratio": 0.5, "target": ">= 0.9", "reached": False}
    (directory / "overhead.json").write_text(
        json.dumps({"format": "allstep-benchmark", "version": 1, "figures": [figure], "samples": {}})
    )
    (directory / "validation.json").write_text(json.dumps(validation_result()))
    write_run(directory / "runs" / "one")


def study_result() -> dict:
    """Return the content of a study.json."""
    points = [{"epoch": epoch, "validation_accuracy": 1 - 0.5 / epoch} for epoch in (1, 2, 3)]
    variants = [f"{series}, {x}" for series in ("fixed", "linear") for x in (32, 1024)]
    claim = {"says": HOSTILE, "measure": "validation_accuracy", "of": ["fixed, 1024"], "against": "fixed, 32"}
    return {
        "format": "allstep-study",
        "version": 1,
        "name": "batch-size",
        "description": {
            "title": f"Batches {HOSTILE}",
            "question": "Which?",
            "expectation": "This.",
            "source": "A paper",
            "flags": {"model": "cnn"},
            "x": {"label": "global batch size", "flag": "global-batch-size", "values": [32, 1024]},
            "series": {"fixed": {}, "linear": {"lr-scaling": "linear"}},
            "figures": [{"y": "validation_accuracy", "x_scale": "log10"}, {"y": "validation_accuracy", "x": "epoch"}],
            "claims": [{**claim, "within": 0.01}],
            "seeds": 2,
        },
        "variants": {name: ["python", "-m", "allstep.pytorch.train"] for name in variants},
        "seeds": 2,
        "command": "allstep study batch-size",
        "created": "2026-11-23T06:00:00+00:00",
        "updated": "2026-11-23T06:10:00+00:00",
        "num_cores": 2,
        "runs": [
            {"variant": name, "seed": seed, "diverged": seed == 1, "seconds": 3.5, "points": points}
            for name in variants
            for seed in (0, 1)
        ],
    }


def search_result() -> dict:
    """Return the content of the file that `allstep tune` writes next to its study."""
    tried = [(0.1, "sgd", 0.9), (0.01, "adam", 0.8), (0.5, "sgd", None), (0.001, HOSTILE, 0.5), (0.2, "adam", 0.95)]
    return {
        "format": "allstep-search",
        "version": 1,
        "metric": "accuracy",
        "command": f"allstep tune space.yaml --data-dir '{HOSTILE}'",
        "space": {"base-lr": {"low": 1e-4, "high": 1.0, "log": True}, "optimizer": ["sgd", "adam", HOSTILE]},
        "trials": [
            {"params": {"base-lr": rate, "optimizer": name}, "value": value, "epochs": {"1": 0.3}}
            for rate, name, value in tried
        ],
    }
