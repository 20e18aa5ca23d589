"""Findings where each rank has a part of a model or an optimizer. Oracle: where ranks of made-up records may differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prove_records import GRADIENTS, STEP, map_steps, names, run, with_more

from allstep.commands.prove.observer.values import projections
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import Collective, Forward, Gradient, Step

_APART = ["weights-differ", "gradients-not-averaged"]


@pytest.mark.parametrize(
    ("losses", "kind", "rows", "expected"),
    [
        ({0: None}, "send", "same", []),  # stages of a pipeline, of which the last one has the loss
        ({}, "all_reduce", "same", []),  # parts of layers on each rank (tensor parallelism)
        ({}, "all_gather", None, _APART),  # a loss that compares samples of all ranks
        ({1: 1.5}, "isend", None, _APART),  # a ring that averages, without a broadcast
        ({1: 1.5}, "all_reduce", None, _APART),
    ],
)
def test_models_of_which_each_rank_has_a_part(losses, kind, rows, expected):
    """Oracle: each rank has weights and gradients of its own; the loss is the same, or one rank's."""

    def change(rank, step):
        [gradient] = step.gradients
        own = replace(gradient, applied=gradient.local)
        return {"gradients": (own,), "weights": {"w": f"{rank}"}, "loss": losses.get(rank, 1 / step.number)}

    together = map_steps(with_more(Collective(kind, "", (4,), "train.py:8")), change)
    ranks = [
        [replace(one, rows=tuple(rows)) if rows and isinstance(one, Forward) else one for one in rank.records]
        for rank in together.ranks
    ]
    assert names(replace(together, ranks=tuple(Rank(tuple(records)) for records in ranks))) == expected


@pytest.mark.parametrize(
    ("begins", "collectives", "expected"),
    [
        ("", ["all_reduce"], []),
        ("r", ["all_reduce"], ["samples-differ"]),
        ("r", [], ["weights-differ", "gradients-partly-averaged"]),
    ],
)
def test_layers_of_which_each_rank_has_a_part(begins, collectives, expected):
    """Tensor parallelism by hand; other samples give other losses. Oracle: where calls add up activations."""

    def change(rank, step):
        [own] = step.gradients
        other = Gradient("common", own.local, own.applied)
        weights = {"w": f"{rank}", "common": "00"}
        return {"gradients": (replace(own, applied=own.local), other), "weights": weights, "loss": 1.0 + rank}

    ranks = []
    for rank in map_steps(run(), change).ranks:
        rows = tuple(f"{begins.replace('r', str(rank.number))}{row}" for row in range(4))
        alike = [
            replace(one, rows=rows, collectives=tuple(collectives)) if isinstance(one, Forward) else one
            for one in rank.records
        ]
        ranks.append(Rank(tuple(alike)))
    assert names(replace(run(), ranks=tuple(ranks))) == expected


@pytest.mark.parametrize(
    ("name", "is_shared"), [("moe.expert.bias", False), ("moe.norm.weight", False), ("moe.gate.weight", True)]
)
def test_the_router_beside_experts(name, is_shared):
    """Oracle: weights of an expert may begin alike, and be its own; a router's are those of all ranks."""

    def change(rank, step):
        [own] = step.gradients
        own = replace(own, applied=own.local)
        weights = {"moe.expert.weight": f"{rank}", name: f"{rank * (step.number - 1)}", "head": "00"}
        shared = Gradient("head", own.local, step.gradients[0].applied)
        return {"gradients": (*(replace(own, name=one) for one in [*weights][:2]), shared), "weights": weights}

    apart = map_steps(run(), change)
    ranks = [
        [replace(one, collectives=("all_to_all",)) if isinstance(one, Forward) else one for one in rank.records]
        for rank in apart.ranks
    ]
    together = replace(apart, ranks=tuple(Rank(tuple(one)) for one in ranks))
    assert names(together) == ["gradients-partly-averaged"] * is_shared


@pytest.mark.parametrize("name", ["parameter 0", "w"])
def test_shards_that_a_script_gives_to_optimizers(name):
    """Flat copies that no backward pass reaches, or other weights on each rank. Oracle: ranks may differ there."""

    def change(rank, step):
        own = name if name != "w" else f"w{rank}"
        gradient = Gradient(own, None, projections(GRADIENTS[rank, step.number - 1]))
        return {"gradients": (gradient,), "weights": {own: f"{rank}"}}

    assert names(map_steps(run(), change)) == []


@pytest.mark.parametrize("weights", ["111", "11r"])
def test_gradients_that_an_optimizer_averages_in_its_own_step(weights):
    """Each rank steps its shard by a part of the average. Oracle: only weights then differ if they are not gathered."""

    def change(rank, step):
        gradient = Gradient("w", *[projections(GRADIENTS[rank, step.number - 1])] * 2)
        return {"gradients": (gradient,), "weights": {"w": weights[step.number - 1].replace("r", str(rank))}}

    apart = map_steps(run(), change)
    inner = Collective("reduce_scatter_single", "", (25,), "train.py:3", callers=("train.py:3", STEP.line))
    ranks = [[[inner, one] if isinstance(one, Step) else [one] for one in rank.records] for rank in apart.ranks]
    together = replace(apart, ranks=tuple(Rank(tuple(sum(own, []))) for own in ranks))
    assert names(together) == ["weights-part"] * (weights == "11r")
    assert names(apart) == ["gradients-not-averaged"] * (weights == "11r")  # as without its reduction
