"""A tagger whose batches carry their lengths to the card and back, as pytorch-forecasting's and many tutorials' do."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

VOCABULARY, TAGS, LENGTHS = 5000, 40, [30, 25, 20, 20, 11, 7, 3, 2]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128, padding_idx=0)
        self.network = nn.LSTM(128, 256, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(512, TAGS)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.network(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(output)


model = Tagger().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    batch = {
        "tokens": torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS))),
        "tags": torch.randint(0, TAGS, (len(LENGTHS), max(LENGTHS))),
        "lengths": torch.tensor(LENGTHS)[torch.randperm(len(LENGTHS))],
    }
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    scores = model(batch["tokens"], batch["lengths"])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch["tags"].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
