"""Subset of a split, and holding out validation samples if a data set has no validation split."""

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Split
from allstep.common.data.passed_over import tell
from allstep.common.data.sharding import sample_order

# An epoch number that training never uses, so that the choice of samples is independent of the order of any epoch.
_EPOCH = -1


class Subset:
    """Samples of a split at the given indices, in the order of the indices."""

    def __init__(self, split: Split, indices: np.ndarray) -> None:
        self.whole, self.indices = split, indices
        self.parallel = split.parallel
        # Those of the whole split, so that both subsets have the same classes and tokens.
        self.num_classes, self.num_tokens, self.inputs, self.class_names, self.fields = (
            getattr(split, name, None) for name in ("num_classes", "num_tokens", "inputs", "class_names", "fields")
        )

    @property
    def targets(self) -> np.ndarray | None:
        """Targets of the whole split."""
        return getattr(self.whole, "targets", None)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.whole.read(self.indices[indices], epoch=epoch)


def hold_out(
    train: Split, validation: Split, config: DataConfig, where: object, *, has_own: bool
) -> tuple[Split, Split]:
    """Return `train` without a share of its samples, and this share of `validation`: the same samples, not augmented.

    A data set that `has_own` validation part keeps both. The choice depends only on the number of samples, the share
    and the seed; both subsets have at least one sample. Raises UserError if there are fewer than two samples.
    """
    if has_own:
        if config.validation_share != DataConfig.validation_share:
            tell(f"--validation-share has no effect on {quote(where)}, which has a part to validate on; leave it out")
        return train, validation
    num_samples = len(train)
    if num_samples < 2:
        raise UserError(
            f"expected at least 2 samples in {where}, of which one is held out to validate, received {num_samples}; "
            "add samples"
        )
    order = sample_order(np.arange(num_samples), num_samples, seed=config.seed, epoch=_EPOCH)
    num_validation = min(max(1, round(config.validation_share * num_samples)), num_samples - 1)
    held, rest = np.sort(order[:num_validation]), np.sort(order[num_validation:])
    return Subset(train, rest), Subset(validation, held)
