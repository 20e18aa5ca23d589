"""Hand-written evaluation of a ResNet-18, with which `after_training.py` compares `allstep evaluate`:

    python -m allstep.benchmarks.handwritten.trained FOLDER CHECKPOINTS

Prints the accuracy on the pictures of class folders, read by a DataLoader with a process for each core.
"""

import os
import sys
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

IMAGE_SIZE, BATCH_SIZE = 160, 32


def evaluate(folder: str, checkpoints: str) -> float:
    """Return the accuracy over all pictures."""
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(round(IMAGE_SIZE * 8 / 7)),
            v2.CenterCrop(IMAGE_SIZE),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images = ImageFolder(folder, transform)
    loader = DataLoader(images, BATCH_SIZE, num_workers=len(os.sched_getaffinity(0)))
    model = torchvision.models.resnet18(num_classes=len(images.classes))
    [weights] = Path(checkpoints).glob("step-*/model.safetensors")
    state = {name: tensor for name, tensor in load_file(weights).items() if name in model.state_dict()}
    model.load_state_dict(state, strict=False)
    model.eval()
    num_right = 0
    with torch.inference_mode():
        for batch, labels in loader:
            num_right += int((model(batch).argmax(1) == labels).sum())
    return num_right / len(images)


if __name__ == "__main__":
    print(evaluate(*sys.argv[1:]))
