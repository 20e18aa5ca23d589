"""Custom PyTorch model trained on custom arrays; the script runs in one process or on any number of ranks.

python examples/session_pytorch.py
horovodrun -np 2 python examples/session_pytorch.py
"""

import torch
from sklearn.datasets import load_digits

from allstep.pytorch import Session

images, labels = load_digits(return_X_y=True)
train, validation = (images[:1500] / 16, labels[:1500]), (images[1500:] / 16, labels[1500:])

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

history = Session(model, train, validation, optimizer=optimizer, epochs=5, global_batch_size=32).fit()
assert history[-1]["validation_accuracy"] > 0.8
