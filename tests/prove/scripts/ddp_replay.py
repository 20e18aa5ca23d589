"""Deep Q-learning: every rank plays in a world of its own, and samples its own memory."""

import copy
import random
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
model = DistributedDataParallel(network)
target = copy.deepcopy(network).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
random.seed(rank)
torch.manual_seed(rank)
memory = deque(maxlen=1000)
state = torch.randn(4)

for move in range(400):
    if random.random() < 0.3:
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = int(network(state[None]).argmax())
    following = (state * 0.9 + 0.1 * torch.randn(4) + (action - 0.5) * 0.1).clamp(-2, 2)
    memory.append((state, action, -following.abs().sum(), following))
    state = following
    if move < 64 or move % 4:
        continue
    states, actions, rewards, followings = zip(*random.sample(memory, 32), strict=False)
    states, rewards, followings = torch.stack(states), torch.stack(rewards), torch.stack(followings)
    values = model(states).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    with torch.no_grad():
        goals = rewards + 0.9 * target(followings).amax(1)
    loss = nn.functional.smooth_l1_loss(values, goals)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if move % 40 == 0:
        target.load_state_dict(network.state_dict())
