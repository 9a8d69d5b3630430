"""Reviews of many lengths for a Transformer, padded to the longest of a batch; validation after every epoch."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

random.seed(1)
torch.manual_seed(1)


def reviews(count):
    made = []
    for _ in range(count):
        length = min(400, max(8, int(random.lognormvariate(4.2, 0.7))))
        made.append((torch.randint(1, 8000, (length,)), random.randrange(2)))
    return made


def collate(rows):
    texts, labels = zip(*rows)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.words, self.places = nn.Embedding(8000, d, padding_idx=0), nn.Embedding(400, d)
        layer = nn.TransformerEncoderLayer(d, 8, 1024, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(d, 2)

    def forward(self, ids):
        mask = ids == 0
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.head(x.mean(1))


def main():
    train = DataLoader(reviews(256), batch_size=16, shuffle=True, collate_fn=collate)
    valid = DataLoader(reviews(128), batch_size=32, collate_fn=collate)
    model = Classifier().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        for ids, labels in train:
            ids, labels = ids.cuda(), labels.cuda()
            optimizer.zero_grad()
            loss = loss_fn(model(ids), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        hits = 0
        with torch.no_grad():
            for ids, labels in valid:
                hits += (model(ids.cuda()).argmax(1).cpu() == labels).sum().item()
        print(epoch, loss.item(), hits / 128)


main()
