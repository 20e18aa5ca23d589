"""Fitted defaults and ranges. Oracles: parameters from which efficiencies were made; published measurements."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from allstep.benchmarks import forecast_fit
from allstep.commands.forecast import command
from allstep.commands.forecast.fitting import calibrated, deviated, deviation, distance, efficiency_range, fit
from allstep.commands.forecast.parameters import BOUNDS, Parameters, fitted, read_packaged
from allstep.commands.forecast.site import KINDS, Site
from allstep.commands.forecast.validation import PUBLISHED, System, check, published_points, read_publication
from allstep.common.files.strict_json import Mismatch

PAGE = Path(forecast_fit.PAGE)


def test_published_efficiencies_are_in_their_range():
    """Oracle: 87 measurements of 13 publications. Ranges are made for 80 % of unseen ones; these were fitted."""
    rows = [check(point) for point in published_points()]
    assert len(rows) == 87
    assert statistics.fmean(row.within for row in rows) >= 0.8
    assert statistics.median(abs(row.error) for row in rows) < 0.035


def test_defaults_are_better_than_the_baselines_for_each_kind_of_link():
    values = fitted().values
    for kind in KINDS:
        points = [point for point in published_points() if point.kind == kind]
        ours, always, apart = (
            statistics.median(abs(found - point.measured) for found, point in zip(forecasts, points, strict=True))
            for forecasts in (
                [point.forecast(values) for point in points],
                [forecast_fit.ALWAYS] * len(points),
                [forecast_fit.without_overlap(point) for point in points],
            )
        )
        assert ours < min(always, apart), kind


def test_the_page_has_every_parameter_and_every_row():
    """Run benchmarks/forecast_fit.py --write after changing the model or the published tables."""
    page = PAGE.read_text()
    for name, parameter in fitted().parameters.items():
        assert f"| {name} | {parameter.value:.3g} | {parameter.low:.3g} to {parameter.high:.3g} |" in page
    for point in published_points():
        forecast = f"{point.measured:.1%} | {point.forecast(fitted().values):.1%} |"
        assert any(point.name in line and forecast in line for line in page.splitlines()), point


def flags_of(system: System) -> list[str]:
    """Return the flags with which a user would ask for a published system."""
    site, network = system.site, "--parameters" if system.network.isdecimal() else "--network"
    flags = [network, system.network, "--batch-size", system.batch_size, "--baseline-ranks", system.baseline_ranks]
    flags += ["--step-ms", 1000 * system.workload.step_seconds, "--ranks-per-node", site.ranks_per_node]
    flags += ["--intra-gbit", site.intra_gbit, "--inter-gbit", site.inter_gbit, "--link", site.link]
    flags += ["--buckets"] if site.fusion.buckets else []
    flags += ["--compression", "fp16"] if site.wire_bytes == 2 else []
    flags += ["--sharded", "--gather-bits", 8 * site.gather_bytes] if site.gather_bytes else []
    flags += ["--algorithm", site.algorithm] if not site.gather_bytes else []
    return [*map(str, flags), "--no-control-plane"]


def test_users_get_the_pages_forecasts(tmp_path):
    """Oracle: the forecasts that were judged."""
    points = {(point.publication, point.name): point for point in published_points()}
    for point in points.values():
        flags = flags_of(point.system)
        command.main([*flags, "--ranks", str(point.num_ranks), "--output", str(tmp_path / "forecast.json")])
        [row] = json.loads((tmp_path / "forecast.json").read_text())["forecasts"]
        found = check(point)
        assert [row[name] for name in ("efficiency", "low", "high")] == pytest.approx(
            [found.forecast, found.low, found.high]
        )


def test_parameters_are_within_their_bounds_and_intervals():
    for name, parameter in fitted().parameters.items():
        assert BOUNDS[name].minimum <= parameter.low <= parameter.value <= parameter.high <= BOUNDS[name].maximum


def test_a_fit_finds_the_parameters_that_made_the_measurements():
    true = dataclasses.replace(fitted().values, rdma=0.65, contention=0.7)
    points = [point for point in published_points() if point.publication in ("ddp", "goyal", "paddle")]
    measured = [point.forecast(true) for point in points]
    usual = {name: BOUNDS[name].middle for name in ("rdma", "contention")}
    known = {name: value for name, value in vars(true).items() if name not in usual}

    def errors(parameters: Parameters) -> list[float]:
        return [1000 * (point.forecast(parameters) - one) for point, one in zip(points, measured, strict=True)]

    found = fit(errors, usual, known=known)
    assert found.rdma == pytest.approx(0.65, abs=0.05) and found.contention == pytest.approx(0.7, abs=0.05)
    assert found.crowding == true.crowding


def test_calibration_leaves_what_is_given_and_what_is_usual():
    usual = vars(fitted().values)
    [point] = [one for one in published_points() if one.name == "azure-v100-tcp-rn50" and one.num_ranks == 8]
    found = calibrated(usual, [(point.forecast, point.measured)], known={"jitter": 0.02})
    assert found.jitter == 0.02
    assert abs(point.forecast(found) - point.measured) < abs(point.forecast(fitted().values) - point.measured) / 2


def test_ranges():
    found, site = fitted(), Site()
    assert efficiency_range(1.0, site, 8, found, baseline_ranks=8) == (1.0, 1.0)

    def width(num_ranks: int, site: Site = site, **options: float) -> float:
        low, high = efficiency_range(0.8, site, num_ranks, found, **options)
        assert 0 <= low < 0.8 < high <= 1.02
        return high - low

    reach = found.reach["rdma"]
    assert width(16) == width(64) < width(4 * reach.max_ranks) < width(16 * reach.max_ranks)
    assert width(16) < width(16, Site(inter_gbit=4 * reach.max_gbit))
    assert width(16) < width(16, Site(inter_gbit=reach.min_gbit / 4, link="rdma"))
    assert width(16, calibrated_ranks=8) < width(16) and width(10**5, calibrated_ranks=8) <= width(10**5)
    assert width(16, calibrated_ranks=8) < width(4096, calibrated_ranks=8)
    assert width(16) < width(16, widening=1.5)
    assert distance(Site(algorithm="host-memory"), 16, found) == found.unseen >= 1


def test_deviations_and_their_inverse():
    """A step that takes 1.25 times the baseline's, forecast as 1.12: a quarter more, and an eighth, of a step."""
    assert deviation(0.8, 1 / 1.12, 0.0) == pytest.approx(math.log(0.12 / 0.25))
    assert deviated(1 / 1.12, math.log(0.12 / 0.25), 0.0) == pytest.approx(0.8)
    for forecast in (0.1, 0.9, 1.0):
        assert deviated(forecast, deviation(0.7, forecast, 0.03), 0.03) == pytest.approx(0.7)
        assert 0 < deviated(forecast, -9.0, 0.03) < forecast < deviated(forecast, 9.0, 0.03) < 1.04
    assert math.isfinite(deviation(1.2, 0.9, 0.03))


def test_the_size_of_deviations_counts_each_publication_once():
    """One publication with a hundred zeros, and nineteen with one deviation each, of either sign."""
    rows = [("many", 0.0)] * 100 + [(f"one{number}", number * (-1.0) ** number) for number in range(1, 20)]
    found = forecast_fit.size_of(rows)
    level = 0.2 * 19 / 21  # lowered for the small number of publications
    assert found.size == pytest.approx(19 - 20 * level + 0.5, abs=0.01)
    assert (found.num_points, found.num_sources) == (119, 20)


def test_a_publication_without_its_source():
    publication = read_packaged(PUBLISHED)["powerai"]
    [system] = publication["systems"].values()
    for wrong, message in (({"source": "s9"}, "sources"), ({"step_seconds": 1}, "step_seconds or images_per_second")):
        changed = {**publication, "systems": {"some": {**system, **wrong}}}
        with pytest.raises(Mismatch, match=message):
            read_publication("powerai", changed)
