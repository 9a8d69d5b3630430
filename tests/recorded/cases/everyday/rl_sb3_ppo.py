"""Proximal policy optimization by Stable-Baselines3 in an environment of one's own: vectorized, evaluated, kept."""

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


class Reach(gym.Env):
    """A point in a plane walks to a goal."""

    def __init__(self, size=4):
        self.size, self.step_limit = size, 40
        self.observation_space = gym.spaces.Box(-10, 10, (2 * size,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (size,), np.float32)

    def _look(self):
        return np.concatenate([self.place, self.goal]).astype(np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal, self.t = np.zeros(self.size), self.np_random.uniform(-3, 3, self.size), 0
        return self._look(), {}

    def step(self, action):
        self.place, self.t = np.clip(self.place + 0.3 * action, -10, 10), self.t + 1
        distance = float(np.linalg.norm(self.place - self.goal))
        return self._look(), -distance, distance < 0.2, self.t >= self.step_limit, {}


train, test = make_vec_env(Reach, n_envs=8, seed=0), make_vec_env(Reach, n_envs=1, seed=9)
model = PPO(
    "MlpPolicy",
    train,
    n_steps=128,
    batch_size=256,
    n_epochs=4,
    learning_rate=lambda left: 3e-4 * left,
    ent_coef=0.01,
    policy_kwargs={"net_arch": {"pi": [1024, 1024], "vf": [1024, 1024]}, "activation_fn": torch.nn.Tanh},
    device="cuda",
    verbose=1,
)
callbacks = [
    EvalCallback(test, eval_freq=64, n_eval_episodes=2, best_model_save_path="best", verbose=1),
    CheckpointCallback(save_freq=128, save_path="kept", name_prefix="ppo"),
]
model.learn(2048, callback=callbacks)
mean, deviation = evaluate_policy(model, test, n_eval_episodes=2)
print(f"reward {mean:.2f} +- {deviation:.2f}")
model.save("ppo_reach")
