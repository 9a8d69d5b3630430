"""A table by two transformers of tab_transformer_pytorch, compared: mixed precision, gradients accumulated, cosine rate."""

import torch
import torch.nn.functional as F
from tab_transformer_pytorch import FTTransformer, TabTransformer
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
CARDINALITIES = (10, 5, 6, 5, 8)
n = 3000
categories = torch.stack([torch.randint(0, c, (n,)) for c in CARDINALITIES], 1)
numbers = torch.randn(n, 10)
labels = (numbers[:, 0] + (categories[:, 0] > 4).float() > 0.5).float()
train, test = random_split(TensorDataset(categories, numbers, labels), [2500, 500])
train = DataLoader(train, batch_size=250, shuffle=True, drop_last=True)
test = DataLoader(test, batch_size=500)


def fit(model, epochs=2, accumulate=2):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train) // accumulate)
    scaler = torch.amp.GradScaler("cuda")
    best = 0.0
    for epoch in range(epochs):
        model.train()
        for i, (c, x, y) in enumerate(train):
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(c.cuda(), x.cuda()).squeeze(-1)
            loss = F.binary_cross_entropy_with_logits(logits.float(), y.cuda()) / accumulate
            scaler.scale(loss).backward()
            if (i + 1) % accumulate == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        model.eval()
        with torch.inference_mode():
            right = sum(
                ((model(c.cuda(), x.cuda()).squeeze(-1) > 0).cpu() == y.bool()).sum().item() for c, x, y in test
            )
        if right / 500 > best:
            best = right / 500
            torch.save(model.state_dict(), "best.pt")
        print(type(model).__name__, epoch, right / 500)
    return best


common = {"categories": CARDINALITIES, "num_continuous": 10, "dim": 64, "dim_out": 1, "depth": 4, "heads": 8}
scores = {
    kind.__name__: fit(kind(**common, **more, attn_dropout=0.1, ff_dropout=0.1))
    for kind, more in ((TabTransformer, {"mlp_act": torch.nn.ReLU()}), (FTTransformer, {}))
}
print(scores)
