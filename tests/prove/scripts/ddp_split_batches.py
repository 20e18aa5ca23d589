"""Accelerate with batches that are split over the ranks, a stream that rank 0 dispatches, and a saved state."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

set_seed(42)
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
)


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(320):
            point = torch.randn(8, generator=generator)
            yield point, (point[0] > 0).long()


points = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
test = TensorDataset(points, (points[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader, test_loader = DataLoader(Stream(), 16), DataLoader(test, 32)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

for epoch in range(2):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    guesses, truths = [], []
    for inputs, labels in test_loader:
        with torch.inference_mode():
            guess, truth = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
        guesses.append(guess)
        truths.append(truth)
    accuracy = (torch.cat(guesses) == torch.cat(truths)).float().mean()
    accelerator.print(f"epoch {epoch}: {accuracy:.3f}")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "split.pt")
