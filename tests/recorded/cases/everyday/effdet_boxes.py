"""Boxes by EfficientDet (effdet): anchors labelled on the card, an average of weights, detections at the end of an epoch."""

import torch
from effdet import DetBenchPredict, create_model_from_config, get_efficientdet_config
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
SIZE, CLASSES = 256, 7


class Shapes(Dataset):
    def __init__(self, n):
        self.images = torch.rand(n, 3, SIZE, SIZE)
        corners, extent = torch.rand(n, 4, 2) * SIZE * 0.6, torch.rand(n, 4, 2) * SIZE * 0.3 + 12
        self.boxes = torch.cat([corners, corners + extent], 2)[..., [1, 0, 3, 2]]
        self.classes = torch.randint(1, CLASSES + 1, (n, 4)).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        scale = {"img_scale": torch.tensor(1.0), "img_size": torch.tensor([float(SIZE), float(SIZE)])}
        return self.images[i], {"bbox": self.boxes[i], "cls": self.classes[i], **scale}


config = get_efficientdet_config("efficientdet_d0")
config.image_size, config.num_classes = (SIZE, SIZE), CLASSES
bench = create_model_from_config(config, bench_task="train", pretrained_backbone=False, bench_labeler=True).cuda()
ema = ModelEmaV2(bench, decay=0.99)
optimizer = torch.optim.AdamW(bench.parameters(), lr=2e-4, weight_decay=1e-4)
scheduler = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1, warmup_lr_init=1e-5)
scaler = torch.amp.GradScaler("cuda")
train, valid = DataLoader(Shapes(40), batch_size=8, shuffle=True), DataLoader(Shapes(8), batch_size=4)
for epoch in range(2):
    bench.train()
    for images, targets in train:
        images, targets = images.cuda(), {k: v.cuda() for k, v in targets.items()}
        with torch.autocast("cuda"):
            output = bench(images, targets)
        optimizer.zero_grad()
        scaler.scale(output["loss"]).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(bench.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        ema.update(bench)
    scheduler.step(epoch + 1)
    ema.module.eval()
    with torch.no_grad():
        for images, targets in valid:
            output = ema.module(images.cuda(), {k: v.cuda() for k, v in targets.items()})
    print(f"epoch {epoch} loss {output['loss'].item():.3f} detections {tuple(output['detections'].shape)}")
    torch.save({"model": bench.state_dict(), "ema": ema.module.state_dict()}, "effdet.pt")
predictor = DetBenchPredict(ema.module.model).cuda().eval()
with torch.inference_mode():
    print(predictor(torch.rand(2, 3, SIZE, SIZE).cuda()).shape)
