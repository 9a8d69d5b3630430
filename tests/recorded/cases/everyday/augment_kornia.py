"""A denoiser trained on images that kornia augments on the card, with SSIM and edges in the loss."""

import kornia
import kornia.augmentation as K
import torch
from torch import nn

torch.manual_seed(5)
device = torch.device("cuda")
augment = nn.Sequential(
    K.RandomHorizontalFlip(p=0.5),
    K.RandomAffine(degrees=15.0, translate=(0.1, 0.1), p=1.0),
    K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0),
)
net = nn.Sequential(
    nn.Conv2d(3, 48, 3, padding=1), nn.PReLU(),
    nn.Conv2d(48, 48, 3, padding=1), nn.PReLU(),
    nn.Conv2d(48, 3, 3, padding=1),
).to(device)  # fmt: skip
ssim = kornia.losses.SSIMLoss(window_size=5)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
images = torch.rand(40, 3, 96, 96)
for step in range(5):
    batch = images[8 * step : 8 * step + 8].to(device)
    with torch.no_grad():
        clean = augment(batch)
        noisy = kornia.filters.gaussian_blur2d(clean, (5, 5), (1.2, 1.2)) + 0.05 * torch.randn_like(clean)
    restored = net(noisy)
    edges = (kornia.filters.sobel(restored) - kornia.filters.sobel(clean)).abs().mean()
    loss = nn.functional.l1_loss(restored, clean) + 0.2 * ssim(restored.clamp(0, 1), clean.clamp(0, 1)) + 0.1 * edges
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    psnr = kornia.metrics.psnr(restored.detach(), clean, 1.0)
    print(f"step {step} loss {float(loss.detach()):.4f} psnr {float(psnr):.2f}")
