"""PPO in one file: a rollout into buffers of the card, then some epochs of minibatches over it."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

ENVS, STEPS, EPOCHS, MINIBATCH, UPDATES, OBS, ACT = 64, 32, 3, 512, 4, 48, 12
rng = np.random.default_rng(0)
torch.manual_seed(0)
device = "cuda"


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(OBS, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
        self.actor = nn.Sequential(nn.Linear(OBS, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, ACT))

    def act(self, x, action=None):
        dist = Categorical(logits=self.actor(x))
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.critic(x).flatten()


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
obs = torch.tensor(rng.standard_normal((ENVS, OBS)), dtype=torch.float32, device=device)
for update in range(UPDATES):
    observations = torch.zeros(STEPS, ENVS, OBS, device=device)
    actions, logprobs, rewards, values = (torch.zeros(STEPS, ENVS, device=device) for _ in range(4))
    for t in range(STEPS):
        observations[t] = obs
        with torch.no_grad():
            actions[t], logprobs[t], _, values[t] = agent.act(obs)
        obs = torch.tensor(rng.standard_normal((ENVS, OBS)), dtype=torch.float32).to(device)
        rewards[t] = torch.tensor(rng.standard_normal(ENVS), dtype=torch.float32).to(device)
    advantages = torch.zeros_like(rewards)
    last = torch.zeros(ENVS, device=device)
    for t in reversed(range(STEPS)):
        following = values[t + 1] if t + 1 < STEPS else agent.critic(obs).flatten().detach()
        last = rewards[t] + 0.99 * following - values[t] + 0.95 * 0.99 * last
        advantages[t] = last
    flat = [part.flatten(0, 1) for part in (observations, actions, logprobs, advantages, advantages + values)]
    for epoch in range(EPOCHS):
        order = torch.randperm(STEPS * ENVS)
        for start in range(0, STEPS * ENVS, MINIBATCH):
            at = order[start : start + MINIBATCH].to(device)
            o, a, old, advantage, returns = (part[at] for part in flat)
            _, new, entropy, value = agent.act(o, a)
            ratio = (new - old).exp()
            surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = surrogate - 0.01 * entropy.mean() + 0.5 * (value - returns).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print("update", update, "explained")
