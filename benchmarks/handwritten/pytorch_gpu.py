"""Reference for the trainer on a GPU in PyTorch: a loop written for speed, on images that are on the device.

It uses autocast, channels last, cuDNN's search, the fused optimizer and torch.compile, without ranks and checks.
float32 is IEEE's, as in the trainer. Only the loop is hand-written; networks are the trainer's, ResNets torchvision's.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, block_arguments, time_blocks
from allstep.pytorch.models import build_model


def main(argv: Sequence[str] | None = None) -> None:
    flags = block_arguments(argv)
    torch.manual_seed(0)
    device = torch.device(flags.device)
    on_gpu = device.type == "cuda"

    shape, size = tuple(flags.synthetic_shape), flags.batch_size
    network = build_model(flags.model, shape, flags.synthetic_classes)
    network.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (it takes both)
    model = torch.compile(network) if flags.compile else network
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
    images = torch.randint(0, 256, (size, *shape), dtype=torch.uint8, device=device)
    labels = torch.randint(0, flags.synthetic_classes, (size,), device=device)
    mean, std = (torch.full((1, shape[2], 1, 1), value, device=device) for value in (127.5, 63.75))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=flags.precision == "bf16"):
            logits = model(images.permute(0, 3, 1, 2).float().sub_(mean).div_(std))
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        time_blocks(flags, step, torch.cuda.synchronize if on_gpu else lambda: None)


if __name__ == "__main__":
    main()
