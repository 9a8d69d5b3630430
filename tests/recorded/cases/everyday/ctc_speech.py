"""Speech recognition in Deep Speech's manner: features of many lengths, convolutions, packed BiLSTM, CTC, greedy decoding, WER."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(7)
use_cuda = torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            t = int(torch.randint(120, 400, (1,), generator=g))
            self.items.append((torch.randn(t, 80, generator=g), torch.randint(1, 29, (t // 8,), generator=g)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(data):
    data = sorted(data, key=lambda x: len(x[0]), reverse=True)
    specs, labels = [d[0] for d in data], [d[1] for d in data]
    return (
        pad_sequence(specs, batch_first=True).transpose(1, 2).unsqueeze(1),
        pad_sequence(labels, batch_first=True),
        torch.tensor([len(s) // 2 for s in specs]),
        torch.tensor([len(l) for l in labels]),
    )


class Model(nn.Module):
    def __init__(self, feats=80, hidden=256, classes=29):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, 3, stride=(2, 1), padding=1),
            nn.GELU(),
        )
        self.fc = nn.Linear(feats // 4 * 32, hidden)
        self.rnn = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.out = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, classes))

    def forward(self, x, lengths):
        x = self.conv(x)
        b, c, f, t = x.size()
        x = self.fc(x.view(b, c * f, t).transpose(1, 2))
        packed = pack_padded_sequence(x, lengths.clamp(max=t).cpu(), batch_first=True)
        x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.log_softmax(self.out(x), dim=-1)


def edit(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


model = Model().to(device)
train = DataLoader(
    Utterances(60, 0),
    batch_size=12,
    shuffle=True,
    collate_fn=collate,
    num_workers=1 if use_cuda else 0,
    pin_memory=use_cuda,
)
test = DataLoader(Utterances(20, 1), batch_size=10, collate_fn=collate)
criterion = nn.CTCLoss(blank=0, zero_infinity=True).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=5e-4, steps_per_epoch=len(train), epochs=1, anneal_strategy="linear"
)
for epoch in range(1):
    model.train()
    for i, (specs, labels, in_len, lab_len) in enumerate(train):
        specs, labels = specs.to(device), labels.to(device)
        optimizer.zero_grad()
        out = model(specs, in_len)
        loss = criterion(out.transpose(0, 1), labels, in_len, lab_len)
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(i, out.shape, loss.item())
    model.eval()
    errors = total = 0
    with torch.no_grad():
        for specs, labels, in_len, lab_len in test:
            best = model(specs.to(device), in_len).argmax(-1).cpu()
            for k in range(len(best)):
                seq = torch.unique_consecutive(best[k, : in_len[k]])
                hyp = seq[seq != 0].tolist()
                ref = labels[k, : lab_len[k]].tolist()
                errors += edit(hyp, ref)
                total += len(ref)
    print("CER", errors / total)
