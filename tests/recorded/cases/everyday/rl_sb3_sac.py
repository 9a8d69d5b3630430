"""Soft actor critic by Stable-Baselines3: a replay buffer on the host, three optimizers, loaded again and watched."""

import gymnasium as gym
import numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise


class Swing(gym.Env):
    observation_space = gym.spaces.Box(-8, 8, (3,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def _look(self):
        return np.array([np.cos(self.angle), np.sin(self.angle), self.speed], np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.angle, self.speed, self.t = self.np_random.uniform(-np.pi, np.pi), 0.0, 0
        return self._look(), {}

    def step(self, action):
        torque = float(np.clip(action[0], -2, 2))
        self.speed = float(np.clip(self.speed + 0.05 * (15 * np.sin(self.angle) + 3 * torque), -8, 8))
        self.angle, self.t = self.angle + 0.05 * self.speed, self.t + 1
        cost = (((self.angle + np.pi) % (2 * np.pi)) - np.pi) ** 2 + 0.1 * self.speed**2 + 0.001 * torque**2
        return self._look(), -cost, False, self.t >= 50, {}


env = Monitor(Swing())
model = SAC(
    "MlpPolicy",
    env,
    buffer_size=5000,
    learning_starts=60,
    batch_size=512,
    tau=0.01,
    train_freq=4,
    gradient_steps=2,
    action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)),
    policy_kwargs={"net_arch": [512, 512]},
    device="cuda",
    seed=1,
)
model.learn(total_timesteps=160, log_interval=2)
model.save("sac_swing")
model = SAC.load("sac_swing", env=env, device="cuda")
observation, _ = env.reset()
for _ in range(20):
    action, _ = model.predict(observation, deterministic=True)
    observation, reward, terminated, truncated, _ = env.step(action)
print("last reward", reward)
