"""DQN on a made-up environment: replay memory, epsilon-greedy, soft target updates."""

import math
import random
from collections import deque, namedtuple
from itertools import count

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
seed = 42
random.seed(seed)
torch.manual_seed(seed)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class Env:
    def reset(self):
        self.t = 0
        return [random.uniform(-1, 1) for _ in range(84 * 84 * 4)], {}

    def step(self, action):
        self.t += 1
        return [random.random() for _ in range(84 * 84 * 4)], float(action), self.t >= 7, False, {}


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n):
        return random.sample(self.memory, n)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, n_actions):
        super().__init__()
        self.c1, self.c2, self.c3 = nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)
        self.f1, self.f2 = nn.Linear(3136, 512), nn.Linear(512, n_actions)

    def forward(self, x):
        x = F.relu(self.c3(F.relu(self.c2(F.relu(self.c1(x.view(-1, 4, 84, 84)))))))
        return self.f2(F.relu(self.f1(x.flatten(1))))


BATCH_SIZE, GAMMA, EPS_START, EPS_END, EPS_DECAY, TAU, LR = 8, 0.99, 0.9, 0.05, 1000, 0.005, 1e-4
policy_net, target_net = DQN(4).to(device), DQN(4).to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory = ReplayMemory(10000)
env, steps_done = Env(), 0


def select_action(state):
    global steps_done
    eps = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(4)]], device=device, dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    non_final_mask = torch.tensor(
        tuple(map(lambda s: s is not None, batch.next_state)), device=device, dtype=torch.bool
    )
    non_final = torch.cat([s for s in batch.next_state if s is not None])
    state_batch, action_batch, reward_batch = torch.cat(batch.state), torch.cat(batch.action), torch.cat(batch.reward)
    q = policy_net(state_batch).gather(1, action_batch)
    next_values = torch.zeros(BATCH_SIZE, device=device)
    with torch.no_grad():
        next_values[non_final_mask] = target_net(non_final).max(1).values
    loss = nn.SmoothL1Loss()(q, (next_values * GAMMA + reward_batch).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


for episode in range(2):
    state, info = env.reset()
    state = torch.tensor(state, dtype=torch.float32, device=device).unsqueeze(0)
    for t in count():
        action = select_action(state)
        observation, reward, terminated, truncated, _ = env.step(action.item())
        reward = torch.tensor([reward], device=device)
        next_state = None if terminated else torch.tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)
        memory.push(state, action, next_state, reward)
        state = next_state
        optimize_model()
        sd, pd = target_net.state_dict(), policy_net.state_dict()
        for key in pd:
            sd[key] = pd[key] * TAU + sd[key] * (1 - TAU)
        target_net.load_state_dict(sd)
        if terminated or truncated:
            break
print("Complete", len(memory))
