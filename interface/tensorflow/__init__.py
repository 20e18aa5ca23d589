"""Public interface of allstep.tensorflow for users' programs; the code is in tensorflow/ of the repository."""

from typing import TYPE_CHECKING, Any

from allstep.common.process.requirements import imported

if TYPE_CHECKING:
    from allstep.tensorflow.session import Session
    from allstep.tensorflow.user_loop import check_replicas, shard, watch

__all__ = ["Session", "check_replicas", "shard", "watch"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: trainers answer --help without them.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(imported(f"{__name__}.{'session' if name == 'Session' else 'user_loop'}"), name)
