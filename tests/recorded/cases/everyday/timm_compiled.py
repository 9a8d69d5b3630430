"""timm's ConvNeXt under torch.compile: channels last, bf16, EMA, AdamW with layer decay, an evaluation."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

torch.manual_seed(0)
model = timm.create_model("convnext_atto", num_classes=37, drop_path_rate=0.1).cuda()
model = model.to(memory_format=torch.channels_last)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
scheduler = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, warmup_lr_init=1e-6)
ema = ModelEmaV3(model, decay=0.999)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=37)
criterion = SoftTargetCrossEntropy().cuda()
compiled = torch.compile(model)
for step in range(4):
    images = torch.randn(32, 3, 160, 160).cuda().contiguous(memory_format=torch.channels_last)
    images, targets = mixup(images, torch.randint(37, (32,)).cuda())
    with torch.autocast("cuda", torch.bfloat16):
        loss = criterion(compiled(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model, step=step)
    scheduler.step(step + 1)
    print(step, loss.item())
model.eval()
with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
    images = torch.randn(32, 3, 160, 160).cuda().contiguous(memory_format=torch.channels_last)
    print(compiled(images).argmax(1).float().mean().item(), ema.module(images).shape)
