"""The classic leak: the sum of the losses keeps every graph (and ``retain_graph`` its saved tensors)."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda:0")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20000, 128)
        self.gru = nn.GRU(128, 256, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.att = nn.Linear(512, 1)
        self.fc = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 5))

    def forward(self, x, lengths):
        mask = torch.arange(x.size(1), device=x.device)[None] < lengths[:, None]
        h, _ = self.gru(self.emb(x))
        w = self.att(h).squeeze(-1).masked_fill(~mask, -1e9).softmax(-1)
        return self.fc((h * w.unsqueeze(-1)).sum(1))


model = Net().to(device)
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
crit = nn.CrossEntropyLoss(label_smoothing=0.1)
data = TensorDataset(torch.randint(1, 20000, (640, 120)), torch.randint(10, 120, (640,)), torch.randint(0, 5, (640,)))
loader = DataLoader(data, batch_size=64, shuffle=True, pin_memory=True)
history = []
for epoch in range(2):
    total_loss = 0
    preds, golds = [], []
    for x, n, y in loader:
        x, n, y = x.to(device, non_blocking=True), n.to(device, non_blocking=True), y.to(device, non_blocking=True)
        out = model(x, n)
        loss = crit(out, y)
        opt.zero_grad(set_to_none=False)
        loss.backward(retain_graph=True)
        opt.step()
        total_loss += loss
        preds.append(out)
        golds.append(y)
    acc = (torch.cat(preds).argmax(-1) == torch.cat(golds)).float().mean()
    history.append(total_loss / len(loader))
    print(
        f"epoch {epoch} loss {history[-1].item():.4f} acc {acc.item():.3f} mem {torch.cuda.max_memory_allocated() >> 20} MiB"
    )
