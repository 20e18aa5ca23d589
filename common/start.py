"""What a trainer does before it builds anything: find its rank, parse its flags, refuse what cannot run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from allstep.common import elastic
from allstep.common.config.command_line import parse
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.by_hand import locate
from allstep.common.launch.loopback import stay_on_host
from allstep.common.launch.placement import Placement, placement
from allstep.common.launch.spawn import spawn
from allstep.common.strategies import print_strategies


class Strategies(Protocol):
    """The functions of a framework's package `strategies` that the start needs."""

    STRATEGIES: tuple[str, ...]

    def check(self, config: TrainConfig, place: Placement) -> None:
        """Refuse what the chosen strategy cannot do."""
        ...

    def availability(self, name: str) -> str | None:
        """Why this machine cannot run a strategy, or None where it can."""
        ...

    def num_ranks_to_spawn(self, config: TrainConfig, place: Placement) -> int:
        """How many ranks this process has to start on this host; 0 where it is a rank itself."""
        ...


def start(strategies: Strategies, argv: Sequence[str] | None = None) -> tuple[TrainConfig, Placement]:
    """The configuration of a run, from the command line of this process or from `argv`, and this rank's place in it.

    Neither NumPy nor the framework is imported before --help and mistakes in the flags have been answered.

    Raises:
        UserError: a flag is wrong, or the run cannot be what it asks for.
        SystemExit: nothing is to be trained here: --help or --list-strategies is answered, or the ranks that this
            process had to start have ended.
    """
    place = placement()
    config = parse(strategies.STRATEGIES, place, argv)
    if config.list_strategies:
        print_strategies(strategies.STRATEGIES, strategies.availability, place)
        sys.exit()
    strategies.check(config, place)
    elastic.check(config, place)
    if num_ranks := strategies.num_ranks_to_spawn(config, place):
        sys.exit(spawn(num_ranks))
    config, place = elastic.with_newest_checkpoint(config), locate(place)
    stay_on_host(place)
    if place.rank == 0:
        from allstep.common.checkpoint import resuming

        resuming.check_early(config)
    return config, place
