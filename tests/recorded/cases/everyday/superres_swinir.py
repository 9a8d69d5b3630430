"""Pictures enlarged by SwinIR (spandrel), judged by a perceptual distance (lpips) and by structure (pytorch_msssim)."""

import lpips
import torch
from pytorch_msssim import MS_SSIM, ssim
from spandrel.architectures.SwinIR import SwinIR
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
network = SwinIR(
    upscale=2, img_size=48, window_size=8, img_range=1.0, depths=[4, 4], embed_dim=60, num_heads=[6, 6], mlp_ratio=2,
    upsampler="pixelshuffledirect",
).cuda()  # fmt: skip
perceptual = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False).cuda()
structure = MS_SSIM(data_range=1.0, size_average=True, channel=3, win_size=5)
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-4, betas=(0.9, 0.99))
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 9], gamma=0.5)
average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
large = torch.rand(40, 3, 96, 96)
train, test = DataLoader(large[:32], batch_size=4, shuffle=True), DataLoader(large[32:], batch_size=2)
small = nn.AvgPool2d(2)
best = 0.0
for epoch in range(2):
    network.train()
    for target in train:
        target = target.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            enlarged = network(small(target))
        enlarged = enlarged.float().clamp(0, 1)
        loss = nn.functional.l1_loss(enlarged, target) + 0.1 * perceptual(enlarged, target, normalize=True).mean()
        loss = loss + 0.2 * (1 - structure(enlarged, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(network)
    average.eval()
    scores = []
    with torch.inference_mode():
        for target in test:
            enlarged = average(small(target.cuda())).clamp(0, 1).cpu()
            scores.append(ssim(enlarged, target, data_range=1.0).item())
    score = sum(scores) / len(scores)
    print(f"epoch {epoch} loss {loss.item():.4f} SSIM {score:.4f}")
    if score > best:
        best = score
        torch.save({"params": network.state_dict(), "params_ema": average.module.state_dict()}, "swinir.pt")
