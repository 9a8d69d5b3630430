"""ArcFace with a one-hot mask that the host makes: cosine[mask == 1]."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
classes, dim, batch = 500, 128, 64


class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(dim, classes))

    def forward(self, embeddings, labels):
        mask = torch.zeros(batch, classes, dtype=embeddings.dtype, device=embeddings.device)
        mask[torch.arange(batch), labels] = 1
        cosine = F.linear(F.normalize(embeddings), F.normalize(self.W.t()))
        target = cosine[mask == 1]
        angles = torch.acos(target.clamp(-1 + 1e-7, 1 - 1e-7))
        difference = (torch.cos(angles + 0.5) - target).unsqueeze(1)
        logits = (cosine + mask * difference) * 64
        return F.cross_entropy(logits, labels)


def host_mask(labels):
    mask = torch.zeros(batch, classes)
    mask.scatter_(1, labels[:, None], 1)
    return mask


net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, dim)).cuda()
loss_fn = ArcFace().cuda()
optimizer = torch.optim.SGD([*net.parameters(), *loss_fn.parameters()], 0.1)
for _ in range(4):
    x, y = torch.randn(batch, 784), torch.randint(classes, (batch,))
    mask = host_mask(y).cuda()
    x, y = x.cuda(), y.cuda()
    e = net(x)
    loss = loss_fn(e, y)
    cosine = F.linear(F.normalize(e), F.normalize(loss_fn.W.t()))
    loss = loss - cosine[mask == 1].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
