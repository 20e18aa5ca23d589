"""Words of the library that has made the process group for advice that PyTorch's own users are given."""

import re

from allstep.commands.prove.records import World
from allstep.commands.prove.runs import Run

_PLAIN = (
    r"DataLoader\(data, sampler=DistributedSampler\(.*\)\)",
    r"sampler=DistributedSampler\(validation, shuffle=False\)",
    r"model = DistributedDataParallel\(model\)",
    r"dist\.all_reduce\(correct\)",
    r"if rank == 0:",
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
    ),
    "lightning.fabric": (
        "loader = fabric.setup_dataloaders(loader)",
        "validation = fabric.setup_dataloaders(validation)",
        "model, optimizer = fabric.setup(model, optimizer)",
        "fabric.all_reduce(correct)",
        "if fabric.is_global_zero:",
        _ONE_SEED,
    ),
    "lightning.pytorch": (
        "Trainer(use_distributed_sampler=True), which gives each rank its share",
        "Trainer(use_distributed_sampler=True)",
        "Trainer(strategy='ddp')",
        "self.log(..., sync_dist=True)",
        "if self.trainer.is_global_zero:",
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
