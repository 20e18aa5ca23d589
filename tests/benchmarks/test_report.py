"""Reports. Oracles: a real browser that opens the page, a parser of HTML, and the numbers that went in."""

from __future__ import annotations

import html
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ranks import REPOSITORY, environment
from requirements import need

from allstep.benchmarks import report
from allstep.benchmarks.comparison.cells import Settings
from allstep.benchmarks.comparison.rules import rules
from allstep.benchmarks.reporting import other_sections
from allstep.benchmarks.reporting.figures import Line, lines
from allstep.benchmarks.reporting.sources import Run, without_secrets
from allstep.common.errors import UserError

ARTEFACTS = REPOSITORY / "build" / "artefacts"
"""Where the screenshots stay; git ignores build/."""
HOSTILE = '<script>alert("x")</script> | `$HOME` & $x$'
CAPTIONS = ("Images per second", "Efficiency", "Training loss", "Validation accuracy", "Peak memory", "Bus bandwidth")


def statistics(middle: float) -> dict:
    low, high = middle * 0.98, middle * 1.02
    return {"num": 5, "median": middle, "mean": middle, "low": low, "high": high, "stdev": 1.0, "min": low, "max": high}


def cell(framework: str, strategy: str, ranks: int, rate: float | None, workload: str = "synthetic-weak") -> dict:
    """A cell as in /compare.json; without a rate it failed."""
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
        "gate": {"status": "passed", "reason": None},
        "comparable": bool(rate),
        "command": f"horovodrun -np {ranks} python -m allstep.benchmarks.synthetic --token=hunter2",
        "images_per_second": statistics(rate) if rate else None,
        "startup_seconds": None if real else statistics(4.0),
        "seconds_to_target": statistics(6.0) if real else None,
        "final_accuracy": 0.9 if real else None,
        "peak_memory_bytes_by_rank": [300 * 2**20] * ranks if rate else None,
        "efficiency": efficiency if rate else None,
        "curve": curve if real else None,
    }


def compare_result() -> dict:
    """What `allstep compare` leaves in compare.json."""
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
        "version": 1,
        "updated": "2026-11-20T17:00:00+00:00",
        "finished": False,
        "command": "allstep compare --ranks 1,2",
        "rules": ["Warm-up is not counted.", "The slowest rank counts."],
        "environment": {
            "versions": {"torch": "2.14.1"},
            "processor": {"name": HOSTILE, "num_cores": 2},
            "variables": {"HOROVOD_SECRET_KEY": "hunter2", "http_proxy": "http://me:hunter2@proxy:80"},
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
                | {"algorithm_bandwidth": bandwidth, "bus_bandwidth": bandwidth}
            )
    return {
        "format": "allstep-collectives", "version": 1, "command": "allstep collectives", "ranks": 2, "rows": rows,
        "failures": {"torch-gloo": "no torchrun"}, "missing": {"tf-distribute": ["broadcast"]}, "variables": {},
    }  # fmt: skip


START = {"event": "start", "framework": "pytorch", "strategy": "horovod", "launcher": "horovodrun", "world_size": 2}
START |= {"global_batch_size": 64}
EPOCHS = [
    {"event": "epoch", "epoch": e, "train_loss": 1 / e, "validation_accuracy": 0.9, "cumulative_seconds": 3.0 * e}
    for e in (1, 2, 3)
]


def validation_result() -> dict:
    """What `allstep predict --validate --output` leaves: a row within 5 points and one that misses."""
    row = {"title": "own runs, pytorch", "system": "horovod", "network": "cnn", "baseline_ranks": 1, "estimated": ""}
    rows = [
        {**row, "num_ranks": 2, "measured": 0.9, "forecast": 0.923, "error": 0.023, "within": True},
        {**row, "num_ranks": 4, "measured": 0.4, "forecast": 0.471, "error": 0.071, "within": False},
    ]
    content = {"command": "allstep predict --validate", "largest_error": 0.05, "rows": rows, "notes": ["Told so."]}
    return {"format": "allstep-validation", "version": 1, **content}


def write_run(directory: Path) -> None:
    """What a trainer leaves in its output directory; the last line is half-written."""
    directory.mkdir(parents=True)
    events = [START, *EPOCHS]
    lines_ = [json.dumps(event) for event in events] + ['{"event": "end", "peak_mem']
    (directory / "metrics.jsonl").write_text("\n".join(lines_))
    (directory / "config.yaml").write_text("strategy: horovod\n")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A directory with a result of every kind."""
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "compare.json").write_text(json.dumps(compare_result()))
    (tmp_path / "collectives.json").write_text(json.dumps(collectives_result()))
    figure = {"what": HOSTILE, "ours": 1.0, "reference": 2.0, "ratio": 0.5, "target": ">= 0.9", "reached": False}
    (tmp_path / "overhead.json").write_text(
        json.dumps({"format": "allstep-benchmark", "version": 1, "figures": [figure], "samples": {}})
    )
    (tmp_path / "validation.json").write_text(json.dumps(validation_result()))
    write_run(tmp_path / "runs" / "one")
    return tmp_path


def test_a_browser_shows_the_page(results):
    """No error on the console, nothing from the network, every figure has a size; the screenshot stays as artefact."""
    need("chromium")
    report.main([str(results)])
    page = (results / "report.html").read_text()
    probe = """<script>window.addEventListener("load", () => {
      const boxes = [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect());
      const seen = boxes.filter(box => box.width > 100 && box.height > 60).length;
      const loaded = performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length;
      const wide = document.body.scrollWidth > innerWidth;
      document.title = `figures ${boxes.length} seen ${seen} loaded ${loaded} wide ${wide}`;
    })</script>"""
    probed = results / "probed.html"
    probed.write_text(page.replace("</body>", probe + "</body>"))
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    for width, picture in ((1200, ARTEFACTS / "report.png"), (390, ARTEFACTS / "report-phone.png")):
        picture.unlink(missing_ok=True)
        common = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
        ]
        common += [f"--user-data-dir={results / 'profile'}", f"--window-size={width},3000"]
        shot = subprocess.run(
            [*common, f"--screenshot={picture}", "--virtual-time-budget=2000", probed.as_uri()],
            env=environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ":CONSOLE" not in shot.stderr, shot.stderr
        assert picture.stat().st_size > 20_000, shot.stderr
    dumped = subprocess.run(
        [*common, "--dump-dom", "--virtual-time-budget=2000", probed.as_uri()],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", dumped.stdout)[1]
    num_figures = page.count("<figure")
    assert num_figures >= len(CAPTIONS)
    assert title == f"figures {num_figures} seen {num_figures} loaded 0 wide false", title
    assert all(caption in page for caption in CAPTIONS)


class Tags(HTMLParser):
    """Counts what a page is made of, and refuses tags that close what is not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.seen, self.links = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "link", "path", "use", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def test_what_enters_is_escaped_and_secrets_stay_out(results):
    report.main([str(results), "--title", HOSTILE])
    page, text = ((results / name).read_text() for name in ("report.html", "report.md"))
    tags = Tags(page)
    assert "script" not in tags.seen and not tags.open
    assert all(link.startswith(("#", "data:")) for link in tags.links)  # no network
    assert "&lt;script&gt;" in page
    assert "hunter2" not in page + text
    assert "(hidden)" in page
    assert not re.search(r"(?<!\\)<script", text)
    table = [line for line in text.splitlines() if line.startswith("| synthetic-weak.pytorch.ddp.2")]
    assert table and len(re.findall(r"(?<!\\)\|", table[0])) == 4  # three cells, whatever is in them


def test_numbers_of_the_results_are_in_both_forms(results, capsys):
    report.main([str(results)])
    assert "half-written" in capsys.readouterr().err
    for name in ("report.html", "report.md"):
        written = (results / name).read_text()
        for what in (
            "1,560",
            "86.7%",
            "allstep compare --ranks 1,2",
            "Warm-up is not counted.",
            "2.14.1",
            "unfinished",
        ):
            assert what in written, (name, what)
        assert (
            f"horovodrun -np 2 python pytorch/train.py --config {results / 'runs' / 'one' / 'config.yaml'}" in written
        )
        assert "1 of 2 efficiencies are forecast within 5 points" in written and "Told so." in written
        assert "MISSED by 7.1 points: own runs, pytorch, horovod, cnn on 4 ranks" in written
        assert "+2.3" in written and "+7.1" in written
        assert "horovod: images" not in written


def test_each_precision_has_a_section_and_what_may_not_be_compared_has_no_curve(results):
    """As `--precisions float32,bf16` leaves it; a cell whose curve is left to chance, one that trained another."""
    content = compare_result()
    content["cells"] += [{**cell, "precision": "bf16", "id": f"{cell['id']}.bf16"} for cell in content["cells"]]
    for strategy, verdict in (("parameter-server", "none"), ("mirrored", "failed")):
        apart = cell("tensorflow", strategy, 2, 2345.0)
        content["cells"].append(
            {**apart, "comparable": False, "gate": {"status": verdict, "reason": f"why {strategy}"}}
        )
    (results / "compare" / "compare.json").write_text(json.dumps(content))
    report.main([str(results)])
    page, text = ((results / name).read_text() for name in ("report.html", "report.md"))
    titles = re.findall(r"^## .*: cnn, batch 64, (.*)$", text, re.MULTILINE)
    assert titles == ["float32", "float32", "bf16", "bf16"]
    assert text.count("Fastest of synthetic-weak, cnn, batch 64, bf16, 2 ranks: tensorflow horovod") == 1
    for strategy in ("parameter-server", "mirrored"):
        assert f"not comparable | why {strategy} |" in text  # said,
        assert f"| tensorflow {strategy} | 2 | 2,345 |" in text  # measured,
        assert not re.search(rf"<text[^>]*>[^<]*{strategy}", page)  # and not held against others


def test_the_rules_of_a_fair_comparison_are_in_both_forms(results):
    """Oracle: the words of the list that they were asked for by; the sentences are those that compare writes."""
    settings = Settings(5, 5, 5, "digits", None, 30, 0.02, 0.97, 10, 1)
    told = rules(settings, num_rounds=5)
    (results / "compare" / "compare.json").write_text(json.dumps({**compare_result(), "rules": told}))
    report.main([str(results)])
    page, text = (html.unescape((results / name).read_text()) for name in ("report.html", "report.md"))
    assert all(rule in page and report.plain(rule) in text for rule in told)
    words = (
        *(
            "parity gate",
            "same curve",
            "otherwise its row says so",
            "warm-up is excluded",
            "idle before each clock read",
        ),
        *("5 times, interleaved", "slowest rank counts", "median, mean with its 95 % confidence interval", "spread"),
        *("1 thread(s) a rank", "same images", "same model, precision and batch", "synthetic input", "real input"),
        *("weak scaling", "strong scaling", "same strategy on one rank", "plain single process"),
        *("independent processes at once", "machine's own limit", "time to accuracy", "peak memory", "start-up"),
        *("failed cells stay", "versions, commit, processor, cores, load, governor, gpus", "launchers", "variable"),
    )
    assert [word for word in words if word not in page.lower()] == []
    assert "fewer than the 5 times" not in page
    assert "fewer than the 5 times" in " ".join(rules(settings, num_rounds=1))


def test_bad_input_is_named_and_the_rest_goes_on(results, capsys):
    other = results / "other"
    other.mkdir()
    (other / "half.json").write_text('{"format": "allstep-compare", "ver')
    (other / "compare.json").write_text(json.dumps({"format": "allstep-compare", "version": 99}))
    (other / "hollow.json").write_text(json.dumps({"format": "allstep-collectives", "version": 1}))
    figure = {"what": "a", "ours": "many", "reference": 1, "ratio": 1, "target": "", "reached": True}
    benchmark = {"format": "allstep-benchmark", "version": 1, "figures": [figure], "samples": {}}
    (other / "words.json").write_text(json.dumps(benchmark))
    (results / "empty").mkdir()
    report.main([str(results), str(results / "empty"), str(results / "nosuch")])
    told = [line for line in capsys.readouterr().err.splitlines() if "a line is half-written" not in line]
    assert len(told) == 6
    for words in (
        "words.json: .*no number in ours",
        "compare.json: .*version 99",
        "hollow.json: .*ranks",
        "half.json",
        "empty: no results",
        "nosuch: no such",
    ):
        assert any(re.search(words, line) for line in told), words
    assert "Fastest of synthetic-weak" in (results / "report.html").read_text()
    with pytest.raises(UserError, match="received none"):
        report.main([str(results / "empty")])


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "expected"),
    [
        ("horovodrun", 4, "horovodrun -np 4 python"),
        ("mpirun", 2, "mpirun --bind-to none --oversubscribe -np 2 python"),
        ("torchrun", 2, "torchrun --nproc-per-node 2"),
        ("srun", 8, "srun -n 8 python"),
        (None, 1, "python"),
        ("allstep", 2, "python"),  # one process, which started the others
    ],
)
def test_a_run_is_repeated_by_its_own_launcher(tmp_path, launcher, num_ranks, expected):
    run = Run({**START, "launcher": launcher, "world_size": num_ranks}, EPOCHS, None, tmp_path / "a b" / "config.yaml")
    [command] = other_sections.runs([(tmp_path, run)]).commands
    assert command == f"{expected} pytorch/train.py --config '{tmp_path}/a b/config.yaml'"


ILL_TYPED = {
    "epoch": [START, {**EPOCHS[0], "train_loss": "low"}],
    "rate": [START, {**EPOCHS[0], "images_per_second": [1]}],
    "memory": [START, *EPOCHS, {"event": "end", "peak_memory_bytes": "much"}],
    "infinite": [START, {**EPOCHS[0], "cumulative_seconds": 10**400}],
    "ranks": [{**START, "world_size": None}],
    "no-event": [START, 7],
    "no-start": EPOCHS,
}


def test_an_ill_typed_run_does_not_drop_the_others(results, capsys):
    for name, events in ILL_TYPED.items():
        (results / "runs" / name).mkdir()
        (results / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (results / "runs" / "one" / "config.yaml").write_text("{")  # its text is nobody's business here
    report.main([str(results)])
    told = [line for line in capsys.readouterr().err.splitlines() if "half-written" not in line]
    assert len(told) == len(ILL_TYPED) and all(any(f"runs/{name}/" in line for line in told) for name in ILL_TYPED)
    written = (results / "report.md").read_text()
    assert "| one | pytorch horovod | 2 | 64 | 3 |" in written and "| epoch |" not in written


def test_a_directory_of_another_program_is_told_in_one_line(results, capsys):
    """As a search for hyperparameters leaves it: nothing of allstep's format."""
    study = results / "study"
    study.mkdir()
    (study / "study.db").write_bytes(b"SQLite format 3\x00")
    (study / "trials.json").write_text('[{"number": 0, "value": 0.9}]')
    (study / "best.json").write_text('{"format": ["a"], "value": 0.9}')
    report.main([str(results), str(study)])
    told = [line for line in capsys.readouterr().err.splitlines() if "half-written" not in line]
    assert told == [f"left out: {study}: no results of allstep in it"]
    assert "Fastest of synthetic-weak" in (results / "report.md").read_text()


def test_secrets():
    given = {
        "url": "https://me:pw@host/x",
        "API_KEY": "abc",
        "command": "run --password=abc --lr 1",
        "loss": 1.0,
        "n": [1],
    }
    hidden = without_secrets(given)
    assert "pw" not in hidden["url"] and "host/x" in hidden["url"]
    assert "abc" not in json.dumps(hidden) and hidden["command"].endswith("--lr 1") and hidden["loss"] == 1.0


def test_figures_are_fit_for_a_page():
    svg = lines(HOSTILE, [Line(HOSTILE, [1, 2], [1.0, 2.0])], x_label="x", y_label="y").svg
    assert svg.startswith("<svg") and "<script" not in svg and "&lt;script&gt;" in svg
    assert "var(--c0)" in svg and "#0072b2" not in svg and 'id="figure' not in svg
