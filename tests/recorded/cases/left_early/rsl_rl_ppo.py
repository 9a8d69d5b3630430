"""PPO by rsl_rl on an environment that lives on the card, as robots are trained: a recurrent critic-free policy with
observation normalisation, adaptive learning rates, saved and played afterwards."""

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class Pendulums(VecEnv):
    def __init__(self, num_envs, device="cuda:0"):
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 6, 200
        self.device, self.cfg = device, {"name": "pendulums"}
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.angles = torch.randn(num_envs, 6, device=device)
        self.speeds = torch.zeros(num_envs, 6, device=device)
        self.goal = torch.randn(num_envs, 6, device=device)

    def get_observations(self):
        policy = torch.cat([self.angles.sin(), self.angles.cos(), self.speeds, self.goal], 1)
        noise = 0.01 * torch.randn_like(policy)
        return TensorDict(
            {"policy": policy + noise, "critic": torch.cat([policy, self.angles], 1)}, batch_size=[self.num_envs]
        )

    def step(self, actions):
        actions = actions.clamp(-1, 1)
        self.speeds = 0.95 * self.speeds + 0.1 * actions - 0.02 * self.angles.sin()
        self.angles = self.angles + 0.05 * self.speeds
        self.episode_length_buf += 1
        rewards = torch.exp(-((self.angles - self.goal) ** 2).mean(1)) - 0.01 * actions.square().sum(1)
        time_outs = self.episode_length_buf >= self.max_episode_length
        dones = time_outs | (self.speeds.abs().amax(1) > 5)
        ids = dones.nonzero(as_tuple=False).flatten()
        self.angles[ids] = torch.randn(len(ids), 6, device=self.device)
        self.speeds[ids] = 0.0
        self.episode_length_buf[ids] = 0
        return self.get_observations(), rewards, dones.long(), {"time_outs": time_outs}


torch.manual_seed(0)
config = {
    "num_steps_per_env": 24,
    "save_interval": 2,
    "obs_groups": {"actor": ["policy"], "critic": ["critic"]},
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 3,
        "num_mini_batches": 4,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "entropy_coef": 0.005,
        "learning_rate": 1e-3,
    },
    "actor": {
        "class_name": "MLPModel",
        "hidden_dims": [256, 128, 64],
        "obs_normalization": True,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0},
    },
    "critic": {"class_name": "MLPModel", "hidden_dims": [256, 128, 64], "obs_normalization": True},
}
env = Pendulums(2048)
runner = OnPolicyRunner(env, config, log_dir=None, device="cuda:0")
runner.learn(num_learning_iterations=4, init_at_random_ep_len=True)
runner.save("model.pt")
policy = runner.get_inference_policy(device="cuda:0")
observations = env.get_observations()
with torch.inference_mode():
    for _ in range(20):
        observations, rewards, dones, _ = env.step(policy(observations))
print(rewards.mean().item(), torch.cuda.max_memory_allocated())
