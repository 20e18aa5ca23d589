"""Lightning module and Trainer with four parts of allstep. Needs `pip install lightning`.

torchrun --standalone --nproc-per-node 2 examples/own_loop_lightning.py runs/own-loop
"""

import os
import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from allstep import checkpoint
from allstep.pytorch import check_replicas, shard, watch


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch):
        steps.begin(self.global_step + 1)
        inputs, targets = batch
        return batches.weight * cross_entropy(self.layer(inputs), targets)

    def on_train_epoch_end(self):
        check_replicas(self, f"after epoch {self.current_epoch + 1}")
        checkpoint.save(sys.argv[1], self.global_step, {"model": self.state_dict()})


torch.distributed.init_process_group()  # before the watch; Lightning uses this process group
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
batches = shard(torch.utils.data.TensorDataset(images.float() / 16, labels), global_batch_size=64)

torch.manual_seed(0)
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=3,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    use_distributed_sampler=False,  # `shard` already gives this rank's batches
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
with watch() as steps:
    trainer.fit(model, batches)
if trainer.is_global_zero:
    weights = model.layer.weight.double().sum().item()
    print(f"{trainer.global_step} steps, weights add up to {weights:.6f}")
torch.distributed.destroy_process_group()
