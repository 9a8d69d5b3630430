"""Fine-tuning a latent diffusion model with LoRA: frozen VAE and text encoder, min-SNR weighting, checkpointing, samples."""

import math
import os
import random
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
RANK, RESOLUTION, BATCH, ACCUMULATE, GAMMA = 8, 256, 4, 2, 5.0


class Pictures(Dataset):
    def __init__(self, size):
        self.rng, self.size = np.random.default_rng(0), size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        pixels = torch.from_numpy(self.rng.uniform(-1, 1, (3, RESOLUTION, RESOLUTION)).astype(np.float32))
        return {"pixel_values": pixels, "input_ids": torch.from_numpy(self.rng.integers(0, 1000, 77))}


def build():
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
        )
    )
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[32, 64, 128, 128],
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=16,
    )
    unet = UNet2DConditionModel(
        sample_size=RESOLUTION // 8,
        block_out_channels=(64, 128, 256),
        layers_per_block=1,
        cross_attention_dim=256,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
    )
    return text, vae, unet


def snr_weights(scheduler, timesteps):
    alphas = scheduler.alphas_cumprod.to(timesteps.device)[timesteps]
    snr = alphas / (1 - alphas)
    return torch.stack([snr, GAMMA * torch.ones_like(snr)], 1).min(1)[0] / snr


@torch.no_grad()
def sample(unet, vae, text, device, steps=4):
    scheduler = DDIMScheduler(num_train_timesteps=1000)
    scheduler.set_timesteps(steps)
    ids = torch.randint(0, 1000, (2, 77), device=device)
    states = text(torch.cat([torch.zeros_like(ids), ids]))[0]
    latents = torch.randn(2, 4, RESOLUTION // 8, RESOLUTION // 8, device=device, dtype=states.dtype)
    for t in scheduler.timesteps:
        with torch.autocast("cuda", torch.float16):
            noise = unet(torch.cat([latents] * 2), t, encoder_hidden_states=states).sample
        free, guided = noise.chunk(2)
        latents = scheduler.step(free + 7.5 * (guided - free), t, latents).prev_sample
    images = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor).sample
    return ((images / 2 + 0.5).clamp(0, 1) * 255).byte().cpu().numpy()


def main():
    device = torch.device("cuda")
    folder = tempfile.mkdtemp()
    text, vae, unet = build()
    for frozen in (text, vae, unet):
        frozen.requires_grad_(False)
    text.to(device, torch.float16)
    vae.to(device, torch.float16)
    unet.to(device, torch.float16)
    unet.add_adapter(
        LoraConfig(
            r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"]
        )
    )
    for parameter in unet.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    unet.enable_gradient_checkpointing()
    unet.train()
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    layers = [p for p in unet.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in layers):,} trainable of {sum(p.numel() for p in unet.parameters()):,}")
    optimizer = torch.optim.AdamW(layers, lr=1e-4, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(Pictures(32), BATCH, shuffle=True, pin_memory=True, drop_last=True)
    step = 0
    for epoch in range(2):
        for index, batch in enumerate(loader):
            pixels = batch["pixel_values"].to(device, torch.float16)
            with torch.no_grad():
                latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
                states = text(batch["input_ids"].to(device))[0]
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (len(latents),), device=device).long()
            noisy = noise_scheduler.add_noise(latents, noise, timesteps)
            with torch.autocast("cuda", torch.float16):
                predicted = unet(noisy, timesteps, states, return_dict=False)[0]
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="none").mean((1, 2, 3))
            loss = (loss * snr_weights(noise_scheduler, timesteps)).mean() / ACCUMULATE
            scaler.scale(loss).backward()
            if (index + 1) % ACCUMULATE == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(layers, 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                if step % 2 == 0:
                    print(step, f"{loss.detach().item():.4f}", math.floor(schedule.get_last_lr()[0] * 1e6))
        images = sample(unet, vae, text, device)
        print("sampled", images.shape)
        torch.save(get_peft_model_state_dict(unet), os.path.join(folder, f"lora_{epoch}.pt"))
        unet.train()


if __name__ == "__main__":
    main()
