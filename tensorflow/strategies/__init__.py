"""The strategies of TensorFlow by the names of `--strategy`; each is one file that spells out the five steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allstep.common.launcher import Placement

if TYPE_CHECKING:
    from allstep.tensorflow.strategies.single import Single

STRATEGIES = ("horovod", "single")


def create(name: str, place: Placement) -> Single:
    """The strategy of that name; its libraries are imported now and no earlier."""
    if name == "horovod":
        from allstep.tensorflow.strategies.horovod import Horovod

        return Horovod(place)
    from allstep.tensorflow.strategies.single import Single

    return Single(place)
