"""Train in this process under an observer, of which every hook fails; print the results of training and what is unseen.

The first argument says where hooks fail: `before` a call, `after` it, or `never`; the second one is a folder.
"""

import json
import sys
from pathlib import Path

from allstep.commands.prove.observer import files, start
from allstep.commands.prove.observer.guarding import Guard
from allstep.commands.prove.observer.observer import Observer, Settings

WHEN, FOLDER = sys.argv[1:3]
MODULES = ("torch", "horovod.torch", "torch.distributed")  # what hooks them is no hook itself
hooks: set[str] = set()


def fail(when: str) -> None:
    if when == WHEN:
        raise RuntimeError("planted")


class FaultyGuard(Guard):
    """Guard whose observers fail."""

    def around(self, what, observe):
        def observation(*args, **kwargs):
            hooks.add(what)
            fail("before")
            yield from observe(*args, **kwargs)
            fail("after")

        return super().around(what, observation)

    def quiet(self, what, function, default=None):
        def observer(*args, **kwargs):
            if what.startswith(MODULES):
                return function(*args, **kwargs)
            hooks.add(what)
            fail("before")
            result = function(*args, **kwargs)
            fail("after")
            return result

        return super().quiet(what, observer, default)


observer = Observer(Settings(FOLDER, __file__, 100), FaultyGuard)
files.install(observer)
start.hook_libraries(observer)

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

imported = set(sys.modules)
hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=8, shuffle=True)
scaler = torch.amp.GradScaler("cpu")
losses = []
for _ in range(2):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    model.eval()
    losses.append(hvd.allreduce(model(torch.randn(2, 4)).sum()).item())
torch.save(model.state_dict(), Path(FOLDER, "model.pt"))
results = {"losses": losses, "hooks": sorted(hooks), "unseen": sorted(observer._unseen), "imported": sorted(imported)}
print(json.dumps(results))
