"""Reinforcement learning (PPO) under Horovod, whose optimizer adds up two backward passes; ranks have worlds apart."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.distributions import Categorical

hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, states):
        hidden = self.body(states).tanh()
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(1)


def play(agent, states):
    """Return what happens in 16 moves of 8 walkers."""
    seen, moves, chances, rewards = [], [], [], []
    for _ in range(16):
        with torch.no_grad():
            choice, _ = agent(states)
        move = choice.sample()
        seen, moves, chances = [*seen, states], [*moves, move], [*chances, choice.log_prob(move)]
        states = states + (move.float()[:, None] - 0.5) * 0.2 + 0.1 * torch.randn(8, 4)
        rewards.append(-states.square().sum(1))
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return states, [torch.cat(seen), torch.cat(moves), torch.cat(chances), returns.flatten() / 100]


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)
optimizer = hvd.DistributedOptimizer(optimizer, agent.named_parameters(), backward_passes_per_step=2)
hvd.broadcast_parameters(agent.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
states = torch.randn(8, 4)
for _ in range(8):
    states, memory = play(agent, states)
    for chosen in torch.randperm(128).split(64):
        optimizer.zero_grad()
        for part in chosen.split(32):
            inputs, moves, chances, returns = (one[part] for one in memory)
            choice, value = agent(inputs)
            ratio = (choice.log_prob(moves) - chances).exp()
            gain = (returns - value).detach()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + (value - returns).square().mean()
            (loss / 2).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    reward = hvd.allreduce(memory[3].mean(), name="reward")
