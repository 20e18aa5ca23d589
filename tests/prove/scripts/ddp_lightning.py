"""A Lightning module, whose Trainer shares the samples, accumulates gradients, clips them and validates."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def training_step(self, batch, _):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch, _):
        inputs, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.layers(inputs), labels), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


points = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points.sum(1) > 0).long())
train, test = torch.utils.data.random_split(data, [512, 128], torch.Generator().manual_seed(0))
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    strategy="ddp",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    use_distributed_sampler=True,
)
trainer.fit(Network(), DataLoader(train, 8), DataLoader(test, 8))
