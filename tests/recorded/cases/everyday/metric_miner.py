"""Pictures by likeness (pytorch_metric_learning): hard triplets mined, a memory of older batches, accuracy by neighbours."""

import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

torch.manual_seed(0)
labels = torch.arange(30).repeat_interleave(10)
data = TensorDataset(torch.rand(300, 3, 112, 112), labels)
sampler = samplers.MPerClassSampler(labels, m=4, batch_size=48, length_before_new_iter=240)
train = DataLoader(data, batch_size=48, sampler=sampler, num_workers=2, drop_last=True)
test = DataLoader(TensorDataset(torch.rand(120, 3, 112, 112), torch.arange(12).repeat_interleave(10)), batch_size=60)
trunk = resnet18(weights=None)
trunk.fc = nn.Identity()
trunk, embedder = trunk.cuda(), nn.Sequential(nn.Linear(512, 128)).cuda()
distance = distances.CosineSimilarity()
triplets = losses.TripletMarginLoss(0.2, distance=distance, reducer=reducers.ThresholdReducer(low=0))
miner = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
memory = losses.CrossBatchMemory(
    losses.ContrastiveLoss(pos_margin=1, neg_margin=0, distance=distance), 128, memory_size=512
)
proxies = losses.ProxyAnchorLoss(num_classes=30, embedding_size=128).cuda()
optimizers = [
    torch.optim.Adam([*trunk.parameters(), *embedder.parameters()], lr=1e-4, weight_decay=1e-4),
    torch.optim.SGD(proxies.parameters(), lr=0.1),
]
for epoch in range(2):
    trunk.train(), embedder.train()
    for images, targets in train:
        images, targets = images.cuda(), targets.cuda()
        embeddings = embedder(trunk(images))
        loss = triplets(embeddings, targets, miner(embeddings, targets)) + 0.1 * memory(embeddings, targets)
        loss = loss + 0.01 * proxies(embeddings, targets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f} triplets {miner.num_triplets}")
    trunk.eval(), embedder.eval()
    with torch.no_grad():
        found = torch.cat([nn.functional.normalize(embedder(trunk(x.cuda()))).cpu() for x, _ in test])
    likeness = found @ found.T - 2 * torch.eye(len(found))
    truth = test.dataset.tensors[1]
    print("precision at 1", (truth[likeness.argmax(1)] == truth).float().mean().item())
    torch.save({"trunk": trunk.state_dict(), "embedder": embedder.state_dict()}, "likeness.pt")
