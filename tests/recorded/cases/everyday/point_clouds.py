"""Point clouds: dynamic graph convolutions over nearest neighbours, farthest points, a PointNet head, jitter."""

import sys
from datetime import datetime

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Logger:
    def __init__(self):
        self.lines = []

    def cprint(self, text):
        self.lines.append(f"{datetime.now():%H:%M:%S} {text}")
        sys.stdout.write(text + "\n")


class Clouds(Dataset):
    def __init__(self, n, points, partition="train"):
        rng = np.random.RandomState(len(partition))
        self.data, self.label = rng.randn(n, points * 2, 3).astype("float32"), rng.randint(0, 8, (n, 1)).astype("int64")
        self.points, self.partition = points, partition

    def __len__(self):
        return self.data.shape[0]

    def __getitem__(self, item):
        cloud = self.data[item][: self.points]
        if self.partition == "train":
            scale = np.random.uniform(low=2.0 / 3.0, high=3.0 / 2.0, size=[3])
            cloud = np.add(np.multiply(cloud, scale), np.random.uniform(-0.2, 0.2, [3])).astype("float32")
            cloud += np.clip(0.01 * np.random.randn(*cloud.shape), -0.02, 0.02).astype("float32")
            np.random.shuffle(cloud)
        return cloud, self.label[item]


def knn(x, k):
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    xx = torch.sum(x**2, dim=1, keepdim=True)
    return (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]


def graph_feature(x, k=16, idx=None):
    b, c, n = x.size()
    x = x.view(b, -1, n)
    idx = knn(x, k) if idx is None else idx
    idx = (idx + torch.arange(0, b, device=x.device).view(-1, 1, 1) * n).view(-1)
    x = x.transpose(2, 1).contiguous()
    feature = x.view(b * n, -1)[idx, :].view(b, n, k, c)
    x = x.view(b, n, 1, c).repeat(1, 1, k, 1)
    return torch.cat((feature - x, x), dim=3).permute(0, 3, 1, 2).contiguous()


def farthest_point_sample(xyz, npoint):
    b, n, _ = xyz.shape
    centroids = torch.zeros(b, npoint, dtype=torch.long, device=xyz.device)
    distance = torch.ones(b, n, device=xyz.device) * 1e10
    farthest = torch.randint(0, n, (b,), dtype=torch.long, device=xyz.device)
    batch = torch.arange(b, dtype=torch.long, device=xyz.device)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[batch, farthest, :].view(b, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        mask = dist < distance
        distance[mask] = dist[mask]
        farthest = torch.max(distance, -1)[1]
    return centroids


class Tnet(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.k = k
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(k, 64, 1), nn.Conv1d(64, 128, 1), nn.Conv1d(128, 256, 1)
        self.fc1, self.fc2 = nn.Linear(256, 128), nn.Linear(128, k * k)
        self.bn1, self.bn2, self.bn3, self.bn4 = (nn.BatchNorm1d(c) for c in (64, 128, 256, 128))

    def forward(self, x):
        b = x.size(0)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(F.relu(self.bn3(self.conv3(x))), 2, keepdim=True)[0].view(-1, 256)
        x = self.fc2(F.relu(self.bn4(self.fc1(x))))
        return (x + torch.eye(self.k, device=x.device).view(1, -1).repeat(b, 1)).view(-1, self.k, self.k)


class DGCNN(nn.Module):
    def __init__(self, classes=8, k=16):
        super().__init__()
        self.k, self.stn = k, Tnet()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))
        self.conv1, self.conv2, self.conv3 = block(6, 32), block(64, 32), block(64, 64)
        self.conv4 = nn.Sequential(nn.Conv1d(128, 256, 1, bias=False), nn.BatchNorm1d(256), nn.LeakyReLU(0.2))
        self.linear1, self.bn, self.dp = nn.Linear(512, 128, bias=False), nn.BatchNorm1d(128), nn.Dropout(0.5)
        self.linear2 = nn.Linear(128, classes)

    def forward(self, x):
        b = x.size(0)
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x1 = self.conv1(graph_feature(x, self.k)).max(dim=-1, keepdim=False)[0]
        x2 = self.conv2(graph_feature(x1, self.k)).max(dim=-1, keepdim=False)[0]
        x3 = self.conv3(graph_feature(x2, self.k)).max(dim=-1, keepdim=False)[0]
        x = self.conv4(torch.cat((x1, x2, x3), dim=1))
        x = torch.cat((F.adaptive_max_pool1d(x, 1).view(b, -1), F.adaptive_avg_pool1d(x, 1).view(b, -1)), 1)
        return self.linear2(self.dp(F.leaky_relu(self.bn(self.linear1(x)), negative_slope=0.2))), trans


def cal_loss(pred, gold, trans, eps=0.2):
    n = pred.size(1)
    one_hot = torch.zeros_like(pred).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - eps) + (1 - one_hot) * eps / (n - 1)
    loss = -(one_hot * F.log_softmax(pred, dim=1)).sum(dim=1).mean()
    eye = torch.eye(3, device=pred.device)[None]
    return loss + 0.001 * torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - eye, dim=(1, 2)))


io = Logger()
np.random.seed(1)
torch.manual_seed(1)
torch.cuda.manual_seed(1)
device = torch.device("cuda")
train_loader = DataLoader(Clouds(26, 256), batch_size=8, shuffle=True, drop_last=True)
test_loader = DataLoader(Clouds(10, 320, "test"), batch_size=4, shuffle=False)
model = nn.DataParallel(DGCNN().to(device))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.9)
for epoch in range(2):
    train_pred, train_true, train_loss, count = [], [], 0.0, 0.0
    model.train()
    for data, label in train_loader:
        data, label = data.to(device), label.to(device).squeeze()
        keep = farthest_point_sample(data, 192)
        data = torch.gather(data, 1, keep[..., None].expand(-1, -1, 3)).permute(0, 2, 1)
        opt.zero_grad()
        logits, trans = model(data)
        loss = cal_loss(logits, label, trans)
        loss.backward()
        opt.step()
        preds = logits.max(dim=1)[1]
        count += data.size(0)
        train_loss += loss.item() * data.size(0)
        train_true.append(label.cpu().numpy())
        train_pred.append(preds.detach().cpu().numpy())
    scheduler.step()
    same = (np.concatenate(train_true) == np.concatenate(train_pred)).mean()
    io.cprint(f"Train {epoch}, loss: {train_loss / count:.6f}, train acc: {same:.6f}")
    with torch.no_grad():
        model.eval()
        votes = []
        for data, label in test_loader:
            logits, _ = model(data.to(device).permute(0, 2, 1))
            votes.append(logits.max(dim=1)[1].detach().cpu())
        io.cprint(f"Test {epoch}, {torch.cat(votes).shape[0]}")
