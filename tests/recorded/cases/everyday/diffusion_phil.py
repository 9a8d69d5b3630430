"""Diffusion by denoising_diffusion_pytorch in a loop of one's own: accumulation, an average of weights, fast sampling."""

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from ema_pytorch import EMA
from torch.utils.data import DataLoader
from torchvision.utils import make_grid

torch.manual_seed(0)
unet = Unet(dim=32, dim_mults=(1, 2, 4), flash_attn=False, dropout=0.1)
diffusion = GaussianDiffusion(unet, image_size=48, timesteps=1000, sampling_timesteps=6, objective="pred_v").cuda()
ema = EMA(diffusion, beta=0.995, update_every=2)
ema.to("cuda")
optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
loader = DataLoader(torch.rand(128, 3, 48, 48), batch_size=8, shuffle=True, pin_memory=True)


def forever(batches):
    while True:
        yield from batches


batches, accumulate = forever(loader), 2
for step in range(12):
    total = 0.0
    for _ in range(accumulate):
        loss = diffusion(next(batches).cuda()) / accumulate
        total += loss.item()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ema.update()
    if step % 6 == 5:
        ema.ema_model.eval()
        with torch.inference_mode():
            images = torch.cat([ema.ema_model.sample(batch_size=n) for n in (8, 4)])
        torch.save({"model": diffusion.state_dict(), "ema": ema.state_dict(), "grid": make_grid(images, 4)}, "last.pt")
    print(f"step {step} loss {total:.4f}")
