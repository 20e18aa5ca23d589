"""A trained run by the name of its output directory, of a checkpoint, or of a safetensors file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.common import checkpoint
from allstep.common.base.errors import UserError, quote, warn
from allstep.common.checkpoint import TrainState
from allstep.common.checkpoint.directories import MANIFEST
from allstep.common.checkpoint.manifest import Manifest
from allstep.common.checkpoint.select import no_checkpoint
from allstep.common.checkpoint.weights_file import check_readable, is_weights_file
from allstep.common.training.description import Description, read_description
from allstep.common.training.resuming import load_weights
from allstep.common.training.saved_run import check_run

CHECKPOINT_HELP = "latest (default), best, or the name of one, as step-00000100"


@dataclass(frozen=True)
class Trained:
    """A checkpoint whose manifest has been read, or a safetensors file, which has none."""

    run: Path
    source: tuple[str, Path]
    """Arguments of `checkpoint.load`; the first may be a safetensors file."""
    manifest: Manifest | None = None
    described: Description | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """Flags of the run by name; none if they are not known."""
        return self.manifest.config if self.manifest else {}

    @property
    def description(self) -> Description:
        """Description of what the run was trained on. Raises UserError if it is not known."""
        if self.described is None:
            raise UserError(
                f"{self.run} does not say what its classes and samples are: it is "
                f"{'a checkpoint of an earlier version; resume it for an epoch' if self.manifest else 'weights alone'}"
                f"{'' if self.manifest else '; name the checkpoint or the run'}"
            )
        return self.described

    def weights(self, shapes: Mapping[str, tuple[int, ...]] | None, *, averaged: bool = False) -> TrainState:
        """Return the weights; see `resuming.load_weights`."""
        return load_weights(self.source, shapes, warn, averaged=averaged)


def open_trained(run: Path, which: str | None = None) -> Trained:
    """Read what is known of a run but its weights.

    `which` is latest (the default), best or the name of a checkpoint. Raises UserError if there is none, or it is
    damaged.
    """
    if is_weights_file(run):
        if which is not None:
            raise UserError(f"--checkpoint {quote(which)} is for output directories, {run} is one file; leave it out")
        check_readable(run)
        return Trained(run, (str(run), run.parent))
    source = _source(run, which)
    manifest = checkpoint.load_manifest(*source, check_run)
    return Trained(run, source, manifest, read_description(manifest.description))


def _source(run: Path, which: str | None) -> tuple[str, Path]:
    if not run.is_dir():
        raise UserError(f"expected a run, a checkpoint or a .safetensors file at {quote(run)}: {no_checkpoint(run)}")
    if (run / MANIFEST).exists() or run.name.startswith("step-"):
        if which is not None:
            raise UserError(f"--checkpoint {quote(which)} is for output directories, {run} is one; leave it out")
        return str(run), run.parent
    parent = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if which in (None, "latest", "best"):
        return which or "latest", parent
    return str(parent / which), parent
