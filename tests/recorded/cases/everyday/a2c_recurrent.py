"""Advantage actor-critic with a recurrent policy: states kept from rollout to rollout, entropy bonus, frames of noise."""

import os
import tempfile
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

ENVS, STEPS, ACTIONS, UPDATES = 16, 20, 6, 12
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Worlds:
    """Copies of a world of noise; episodes end by chance."""

    def __init__(self, count, seed):
        self.rng, self.count = np.random.default_rng(seed), count
        self.scores = np.zeros(count)

    def observe(self):
        return self.rng.integers(0, 256, (self.count, 3, 64, 64), dtype=np.uint8)

    def step(self, actions):
        reward = (actions == self.rng.integers(0, ACTIONS, self.count)).astype(np.float32)
        done = self.rng.random(self.count) < 0.05
        self.scores += reward
        ended = self.scores[done].tolist()
        self.scores[done] = 0
        return self.observe(), reward, done.astype(np.float32), ended


def orthogonal(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Policy(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.encoder = nn.Sequential(
            orthogonal(nn.Conv2d(3, 32, 8, 4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * 4 * 4, hidden)),
            nn.ReLU(),
        )
        self.memory = nn.GRUCell(hidden, hidden)
        self.actor, self.critic = orthogonal(nn.Linear(hidden, ACTIONS), 0.01), orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(self, frames, state, done):
        state = self.memory(self.encoder(frames.float() / 255), state * (1 - done).unsqueeze(1))
        return Categorical(logits=self.actor(state)), self.critic(state).squeeze(1), state


def returns_of(rewards, dones, last, gamma=0.99):
    result, running = [], last
    for reward, done in zip(reversed(rewards), reversed(dones)):
        running = reward + gamma * running * (1 - done)
        result.append(running)
    return torch.stack(result[::-1])


@torch.no_grad()
def evaluate(policy, episodes=3):
    worlds, scores = Worlds(4, 99), []
    state, done = torch.zeros(4, 256, device=device), torch.zeros(4, device=device)
    frames = worlds.observe()
    for _ in range(30):
        chosen, _, state = policy(torch.from_numpy(frames).to(device), state, done)
        frames, _, ended, told = worlds.step(chosen.probs.argmax(-1).cpu().numpy())
        done = torch.from_numpy(ended).to(device)
        scores += told
    return float(np.mean(scores)) if scores else 0.0


def main():
    torch.manual_seed(1)
    np.random.seed(1)
    worlds, policy = Worlds(ENVS, 0), Policy().to(device)
    optimizer = torch.optim.RMSprop(policy.parameters(), 7e-4, alpha=0.99, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, UPDATES)
    frames, state = worlds.observe(), torch.zeros(ENVS, 256, device=device)
    done, recent = torch.zeros(ENVS, device=device), deque(maxlen=100)
    for update in range(UPDATES):
        logs, values, entropies, rewards, dones = [], [], [], [], []
        state = state.detach()
        for _ in range(STEPS):
            chosen, value, state = policy(torch.from_numpy(frames).to(device), state, done)
            action = chosen.sample()
            frames, reward, ended, told = worlds.step(action.cpu().numpy())
            recent.extend(told)
            done = torch.from_numpy(ended).to(device)
            logs.append(chosen.log_prob(action))
            values.append(value)
            entropies.append(chosen.entropy())
            rewards.append(torch.from_numpy(reward).to(device))
            dones.append(done)
        with torch.no_grad():
            _, last, _ = policy(torch.from_numpy(frames).to(device), state, done)
        wanted, values = returns_of(rewards, dones, last), torch.stack(values)
        advantage = (wanted - values).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        loss = (
            -(torch.stack(logs) * advantage).mean()
            + 0.5 * F.smooth_l1_loss(values, wanted)
            - 0.01 * torch.stack(entropies).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if update % 4 == 0:
            print(f"{update} loss {loss.item():.3f} score {np.mean(recent) if recent else 0:.2f}")
    print("evaluation", evaluate(policy))
    torch.save(policy.state_dict(), os.path.join(tempfile.mkdtemp(), "policy.pt"))


if __name__ == "__main__":
    main()
