"""A script with Accelerate: gradient accumulation, a scheduler, and metrics that are gathered."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
points = torch.rand(512, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points[:, 0] * 4).long())
train, test = torch.utils.data.random_split(data, [384, 128], torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)
train_loader, test_loader = DataLoader(train, 8, shuffle=True), DataLoader(test, 8)
model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, test_loader, schedule
)

for epoch in range(2):
    model.train()
    total = 0.0
    for inputs, labels in train_loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.detach().float()
    model.eval()
    correct = 0
    for inputs, labels in test_loader:
        with torch.no_grad():
            guesses = model(inputs).argmax(1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        correct += int((guesses == labels).sum())
    total = accelerator.reduce(total)
    accelerator.print(f"epoch {epoch}: loss {float(total):.3f}, {correct} correct")
