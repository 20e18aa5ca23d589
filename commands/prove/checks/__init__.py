"""Checks of the ranks' records: pure functions, one file for each aspect of data-parallel training.

Advice is in the words of the library that has made the process group, or in those for PyTorch's own users.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from allstep.commands.prove.checks import cooperation, gradients, outputs, randomness, rates, samples, sharing, weights
from allstep.commands.prove.findings import Finding
from allstep.commands.prove.records import World
from allstep.commands.prove.runs import Run, Runs

_OTHER_STEPS = ("steps-skipped", "line-search-alone")
"""Findings that ranks take different steps, whose gradients and collectives then do not fit."""
_MOVE_WEIGHTS = (
    "weights-differ",
    "optimizer-state-differs",
    "gradients-not-averaged",
    "gradients-partly-averaged",
    "samples-differ",
    "clipped-before-average",
    "learning-rate-differs",
    *_OTHER_STEPS,
)
"""Findings that explain why weights diverge."""


def findings(runs: Runs) -> list[Finding]:
    """Return all findings, one of each kind for a line, except those that are consequences of another."""
    if alone := [*cooperation.check_world(runs)]:
        return alone
    found = [*weights.check(runs), *cooperation.check_steps(runs)]
    takes_same_steps = not any(one.name in _OTHER_STEPS for one in found)
    if takes_same_steps:
        found += gradients.check(runs)
    found += rates.check(runs)
    if not any(one.name in _MOVE_WEIGHTS for one in found):
        found += weights.check_later(runs)
    for check in (samples.check, randomness.check, outputs.check, cooperation.check_devices):
        found += check(runs)
    # Losses that compare samples with each other change if a sample is there twice.
    moved = [(cause, "buffers-differ") for cause in (*_MOVE_WEIGHTS, "weights-part")]  # also averages, and GANs' rivals
    for cause, effect in (*moved, ("same-samples", "loss-scaled")):
        if any(one.name == cause for one in found):
            found = [one for one in found if one.name != effect]
    if takes_same_steps and not any(one.name == "uneven-batches" for one in found):
        found += cooperation.check_collectives(runs)
    first = {(one.name, one.line): one for one in reversed(found)}
    return [replace(one, mend=in_words_of(runs.together, one.mend)) for one in reversed(first.values())]


def perhaps(runs: Runs, found: Sequence[Finding]) -> list[str]:
    """Return what may be wrong in addition to the findings."""
    if any(one.name in ("ranks-alone", "replicas-idle", "same-samples") for one in found):
        return []
    names = {one.name for one in found}
    lines = [one for one in (sharing.judge(runs), samples.same_samples(runs.together)) if isinstance(one, str)]
    if not names & {"uneven-batches", "collective-left-out", *_OTHER_STEPS}:
        lines += cooperation.may_be_uneven(runs.together)
    for check in (cooperation.may_restore_less, cooperation.may_search):
        lines += check(runs.together)
    lines += [*gradients.may_compare_less(runs), *rates.may_fall_slower(runs)]
    return [in_words_of(runs.together, one) for one in (*lines, *randomness.may_be_wrong(runs, names))]


_PLAIN = (
    r"DataLoader\(data, sampler=DistributedSampler\(.*\)\)",
    r"sampler=DistributedSampler\(validation, shuffle=False\)",
    r"model = DistributedDataParallel\(model\)",
    r"dist\.all_reduce\(correct\)",
    r"if rank == 0:",
    r"after the model is made: torch\.manual_seed\(seed \+ rank\)",
    r"give the DistributedSampler of every rank the same seed and epoch",
)
_ONE_SEED = "seed_everything(seed) alike on all ranks, of which samplers take their seeds"
_LIBRARIES = {
    "accelerate": (
        "loader = accelerator.prepare(loader)",
        "validation = accelerator.prepare(validation), and bring results together by accelerator.gather_for_metrics",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        "accelerator.gather_for_metrics((predictions, labels))",
        "if accelerator.is_main_process:",
        "set_seed(seed, device_specific=True)",
    ),
    "lightning.fabric": (
        "loader = fabric.setup_dataloaders(loader)",
        "validation = fabric.setup_dataloaders(validation)",
        "model, optimizer = fabric.setup(model, optimizer)",
        "fabric.all_reduce(correct)",
        "if fabric.is_global_zero:",
        "after the model is made: torch.manual_seed(seed + fabric.global_rank)",
        _ONE_SEED,
    ),
    "lightning.pytorch": (
        "Trainer(use_distributed_sampler=True), which gives each rank its share",
        "Trainer(use_distributed_sampler=True)",
        "Trainer(strategy='ddp')",
        "self.log(..., sync_dist=True)",
        "if self.trainer.is_global_zero:",
        "after the model is made: torch.manual_seed(seed + self.global_rank)",
        _ONE_SEED,
    ),
    "transformers": (
        "leave get_train_dataloader to Trainer, or return self.accelerator.prepare(loader) from it",
        "leave get_eval_dataloader to Trainer, or return self.accelerator.prepare(loader) from it",
        "model = self.accelerator.prepare(model) in Trainer",
        "self.accelerator.gather_for_metrics((predictions, labels))",
        "if self.is_world_process_zero():",
    ),
}
_OLD_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def in_words_of(run: Run, text: str) -> str:
    """Return advice in the words of the outermost library that made the process group; as it is without one."""
    makers = [name for rank in run.ranks[:1] for world in rank.all(World)[-1:] for name in world.makers]
    current = [_OLD_NAMES.get(name.partition(".")[0], name) for name in makers]
    library = next((one for name in current for one in _LIBRARIES if f"{name}.".startswith(f"{one}.")), "")
    for plain, own in zip(_PLAIN, _LIBRARIES.get(library, ()), strict=False):
        text = re.sub(plain, own, text)
    return text
