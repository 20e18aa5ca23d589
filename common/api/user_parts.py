"""Data set, model and optimizer that a user's program passes to a run instead of naming them by flags."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import OWN_OPTIMIZER

if TYPE_CHECKING:  # trainers answer --help without NumPy
    from allstep.common.data.datasets import Dataset


@dataclasses.dataclass(frozen=True)
class Parts:
    """Objects of a user's program; each is None if a flag names it."""

    dataset: Dataset | None = None
    model: Any = None
    """Network, or a function that builds one from the shape of a sample and the number of classes."""
    optimizer: Any = None
    """An optimizer, or a function that builds one where the network is."""
    adapt: Callable[[Dataset], Dataset] = lambda dataset: dataset
    """Function that changes or refuses the data set, once it is open."""

    def optimizer_or(self, build: Callable[[], Any], name: str) -> Any:
        """Return the program's optimizer, or the result of `build` if --optimizer names one; `name` is its value.

        Raises UserError if the flag stands for a program's optimizer and there is none, or if the program's function
        needs arguments.
        """
        if self.optimizer is None and name == OWN_OPTIMIZER:
            raise UserError(f"--optimizer {name} needs a Session that is given an optimizer; name another one")
        if not callable(self.optimizer):
            return self.optimizer or build()
        try:
            inspect.signature(self.optimizer).bind()
        except TypeError as error:
            kind = type(self.optimizer).__name__
            raise UserError(f"expected a function that builds the optimizer, received {kind}: {error}") from error
        return self.optimizer()


def check_kind(optimizer: Any, kind: type) -> None:
    """Raise UserError if a program's optimizer is not an instance of `kind`, the framework's base class."""
    if not isinstance(optimizer, kind):
        framework, received = kind.__module__.partition(".")[0], type(optimizer).__name__
        raise UserError(f"expected a name of --optimizer or an optimizer of {framework}, received {received}; give one")


NOTHING = Parts()
"""Parts of a run that is described only by flags."""
