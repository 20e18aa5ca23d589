"""Reports. Oracles: a real browser that opens the page, an HTML parser, and the input numbers."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
from html.parser import HTMLParser

from browser import CUT_OFF, WIDTHS, chromium
from ranks import REPOSITORY, run
from reported import HOSTILE, cell, compare_result, statistics, write_run
from requirements import need

from allstep.commands.compare.cells import Settings
from allstep.commands.compare.table import rules
from allstep.commands.forecast import command as forecast
from allstep.commands.report import command as report
from allstep.commands.shared.page.document import plain
from allstep.commands.shared.page.figures import Line, bars, lines

ARTEFACTS = REPOSITORY / "build" / "artefacts"
"""Folder of the screenshots; git ignores build/."""
BOXES = """[...document.querySelectorAll("figure svg")].map(
  svg => { const box = svg.getBoundingClientRect(); return [box.width, box.height]; })"""
LOADED = 'performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length'
FONT_SIZES = """[...document.querySelectorAll("figure svg text")].map(
  text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)"""
MIN_FONT_SIZE = 11
"""Pixels of the smallest letters in a figure, on a phone as well."""
CAPTIONS = ("Images per second", "Efficiency", "Training loss", "Validation accuracy", "Peak memory", "Bus bandwidth")


def test_a_browser_shows_the_page(results):
    """Nothing is cut off or comes from the network, figures have a size, and tables sort; screenshots are kept."""
    need("chromium")
    report.main([str(results)])
    page = (results / "report.html").read_text()
    with chromium(results / "profile") as tab:
        for width, is_dark in itertools.product(WIDTHS, (False, True)):
            tab.open((results / "report.html").as_uri(), width=width, dark=is_dark)
            tab.screenshot(ARTEFACTS / f"report-{width}-{'dark' if is_dark else 'light'}.png")
            assert (tab.errors, tab.run(CUT_OFF)) == ([], [])
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run(LOADED) == 0
            boxes = tab.run(BOXES)
            assert len(boxes) == page.count("<figure") >= len(CAPTIONS)
            assert all(box[0] > 300 and box[1] > 60 for box in boxes), boxes
            assert min(tab.run(FONT_SIZES)) >= MIN_FONT_SIZE
            background = tab.run("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(21, 24, 28)" if is_dark else "rgb(255, 255, 255)")
        column = """(() => {
          const head = [...document.querySelectorAll("th")].find(one => one.textContent === "images/s");
          head.click();
          return [...head.closest("table").tBodies[0].rows].map(row => row.cells[head.cellIndex].textContent);
        })()"""
        for is_reversed in (False, True):
            rates = [float(text.replace(",", "")) for text in tab.run(column)]
            assert len(rates) > 3 and rates == sorted(rates, reverse=is_reversed)
    assert all(caption in page for caption in CAPTIONS)


class Tags(HTMLParser):
    """Counts the elements of a page, and rejects closing tags without an opening one."""

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
    assert tags.seen.count("script") == 1 and not tags.open  # ours, which sorts tables
    assert all(link.startswith(("#", "data:")) for link in tags.links)  # no network
    assert "&lt;script&gt;" in page
    assert "hunter2" not in page + text
    assert "(hidden)" in page
    assert not re.search(r"(?<!\\)<script", text)
    table = [line for line in text.splitlines() if line.startswith("| synthetic-weak.pytorch.ddp.2")]
    assert table and len(re.findall(r"(?<!\\)\|", table[0])) == 4  # three cells, whatever they contain


def test_numbers_of_the_results_are_in_both_forms(results, capsys):
    report.main([str(results)])
    assert "half-written" in capsys.readouterr().err
    for name in ("report.html", "report.md"):
        written = (results / name).read_text()
        for what in (
            "1,560",
            "86.7%",
            "134.6%",
            "of pytorch",
            "allstep compare --ranks 1,2",
            "Warm-up is not counted.",
            "2.14.1",
            "unfinished",
        ):
            assert what in written, (name, what)
        assert (
            f"horovodrun -np 2 python pytorch/train.py --config {results / 'runs' / 'one' / 'config.yaml'}" in written
        )
        assert "1 of 2 efficiencies lie in the 10 to 90 % range" in written and "Told so." in written
        assert "MISSED by 7.1 points: own runs, pytorch, horovod, cnn on 4 ranks" in written
        assert "+2.3" in written and "+7.1" in written
        assert "0.87" in written and "0.63" in written  # Horovod's all-reduce over MPI's
        assert "horovod: images" not in written


def test_each_precision_has_a_section_and_what_may_not_be_compared_has_no_curve(results):
    """Such a result comes from `--precisions float32,bf16`, with a cell that has no gate and one that failed it."""
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
    assert titles == re.findall(r"^\*\*.*: cnn, batch 64, (.*)\*\*$", text, re.MULTILINE)
    for strategy in ("parameter-server", "mirrored"):
        assert f"not comparable | why {strategy} |" in text  # reported,
        assert f"| tensorflow {strategy} | 2 | 2,345 |" in text  # measured,
        assert not re.search(rf"<text[^>]*>[^<]*{strategy}", page)  # and not drawn next to others


def test_the_overview_says_who_is_faster_on_most_ranks(tmp_path):
    content = compare_result()
    rival = cell("pytorch", "ddp", 2, 1600.0)
    content["cells"] = [one for one in content["cells"] if one["workload"] == rival["workload"]]
    content["cells"] = [one for one in content["cells"] if one["id"] != rival["id"]] + [rival]
    [winner] = [one for one in content["cells"] if one["id"] == rival["id"].replace("ddp", "horovod")]
    winner["against"] = {"ddp": statistics(1.2)}
    (tmp_path / "compare.json").write_text(json.dumps(content))
    report.main([str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    overview = text[: text.index("allstep compare")].replace("\\", "")
    assert re.findall("^- (.*)", overview, re.MULTILINE)[:2] == [
        "pytorch on 2 ranks: horovod is the fastest, 20.0% faster than ddp (17.6% to 22.4%, 95%).",
        "horovod on 2 ranks: tensorflow is 34.6% faster than pytorch (1.32 to 1.37 times its speed, 95%).",
    ]


def test_the_rules_of_a_fair_comparison_are_in_both_forms(tmp_path):
    """Oracle: the sentences that compare writes."""
    settings = Settings(5, 5, 5, "digits", None, 30, 0.02, 0.97, 10, 1, True)
    sentences = rules(settings, num_rounds=5)
    content = {**compare_result(), "rules": sentences, "cells": [cell("pytorch", "horovod", 2, 1560.0)]}
    (tmp_path / "compare.json").write_text(json.dumps(content))
    report.main([str(tmp_path)])
    page, text = (html.unescape((tmp_path / name).read_text()) for name in ("report.html", "report.md"))
    assert all(rule in page and plain(rule) in text for rule in sentences)
    assert "fewer than the 5 times" not in page
    assert "fewer than the 5 times" in " ".join(rules(settings, num_rounds=1))


def test_figures_are_fit_for_a_page():
    svg = lines(HOSTILE, [Line(HOSTILE, [1, 2], [1.0, 2.0])], x_label="x", y_label="y").svg
    assert svg.startswith("<svg") and "<script" not in svg and "&lt;script&gt;" in svg
    assert "var(--c0)" in svg and "#0072b2" not in svg and 'id="figure' not in svg


def test_bars_have_their_values_without_exponents():
    svg = bars("Peak memory", ["small", "large"], [12.345, 1234.5], x_label="MiB").svg
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"12.3", "1,234", "small", "large", "MiB"} <= set(texts)


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    """The limit on file sizes ends the write in the middle."""
    results = tmp_path
    write_run(results / "run")
    report.main([str(results)])
    before = {name: (results / name).read_bytes() for name in ("report.html", "report.md")}
    limited = ("prlimit", f"--fsize={len(before['report.html']) // 2}")
    result = run(*limited, "allstep", "report", results, "--title", "another")
    assert (result.returncode, result.stdout) == (2, ""), result.output
    cause = f"expected to write {results}/report.html, received the error: File too large; name another file"
    assert cause in result.stderr and result.stderr.count("allstep: error") == 1
    assert {name: (results / name).read_bytes() for name in before} == before
    assert not list(results.glob(".*"))


def test_names_of_folders_control_neither_terminal_nor_page(tmp_path, capsys):
    """Escape sequences, line breaks, Markdown, bytes that are not UTF-8, and more than a figure has room for."""
    results, folder = tmp_path, tmp_path / "runs" / "a\x1b[31m\n```\n# x\udcff\u202e"
    write_run(tmp_path / "runs" / "one")
    for copy in (folder, tmp_path / "runs" / ("r" * 250)):
        shutil.copytree(tmp_path / "runs" / "one", copy)
    (folder / "broken.json").write_text("{")
    report.main([str(results), "--title", "\x1b]0;owned\x07"])
    printed = capsys.readouterr()
    files = [(name, (results / f"report.{name}").read_text()) for name in ("md", "html")]
    for name, text in (*files, ("out", printed.out), ("err", printed.err)):
        assert all(line.isprintable() for line in text.split("\n")), name
    text = (results / "report.md").read_text()
    assert "\n# x" not in text and text.count("```") % 2 == 0
    assert "Warning" not in printed.err


def test_a_forecast_has_its_range_as_a_band(tmp_path):
    """Older results have no range."""
    path = tmp_path / "forecast.json"
    forecast.main(["--step-ms", "200", "--ranks", "1,8,64", "--output", str(path)])
    content = json.loads(path.read_text())
    limits = [f"{row.pop('low'):.1%} to {row.pop('high'):.1%}" for row in content["forecasts"]]
    for are_there in (True, False):
        report.main([str(tmp_path)])
        page, text = ((tmp_path / name).read_text() for name in ("report.html", "report.md"))
        assert all((limit in text) is are_there for limit in limits)
        assert ("opacity: 0.2" in page) is are_there  # the band's filling
        path.write_text(json.dumps(content))


def test_the_classes_of_a_run_have_figures(tmp_path):
    start = {"event": "start", "world_size": 1, "global_batch_size": 4, "framework": "pytorch", "strategy": "single"}
    epoch = {"event": "epoch", "epoch": 1, "train_loss": 1.0, "cumulative_seconds": 1.0, "validation_accuracy": 0.5}
    epoch |= {"validation_confusion_matrix": [[613, 3], [0, 7]], "validation_f1_per_class": [0.375, 1.0]}
    (tmp_path / "run").mkdir()
    lines = (json.dumps(event) for event in ({**start, "classes": ["<cat>", "dog"]}, epoch))
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    for shown in ("Confusion matrix of run", "613", "&lt;cat&gt;", "F1 of each class of run", "0.375"):
        assert shown in page, shown
