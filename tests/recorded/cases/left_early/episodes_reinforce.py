"""REINFORCE on an environment of the host: every episode is as long as it happens to be, and ends in a step."""

import random

import torch
from torch import nn
from torch.distributions import Categorical

random.seed(3)
torch.manual_seed(3)
device = torch.device("cuda")


class Walk:
    """A walk on a line that ends at its ends, or after some time."""

    def reset(self):
        self.at, self.left = 0.0, random.randint(10, 60)
        return self.state()

    def state(self):
        return [self.at, float(self.left), 1.0, 0.0]

    def step(self, action):
        self.at += 0.1 if action else -0.1
        self.left -= 1
        return self.state(), 1.0 - abs(self.at), self.left == 0


class Policy(nn.Module):
    def __init__(self, hidden=1024):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.actor, self.critic = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.net(x)
        return Categorical(logits=self.actor(h)), self.critic(h)


env, policy = Walk(), Policy().to(device)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(14):
    state, done = env.reset(), False
    log_probs, values, rewards = [], [], []
    while not done:
        dist, value = policy(torch.tensor(state, device=device))
        action = dist.sample()
        state, reward, done = env.step(random.random() < 0.5)
        log_probs.append(dist.log_prob(action))
        values.append(value)
        rewards.append(reward)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns, device=device)
    advantage = returns - torch.cat(values).squeeze()
    loss = -(torch.stack(log_probs) * advantage.detach()).mean() + advantage.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"episode {episode}: {len(rewards)} steps")
