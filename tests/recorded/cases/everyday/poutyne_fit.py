"""Time series by Poutyne's Model.fit: recurrent and convolved, callbacks for checkpoints, rates and clipped gradients."""

import torch
from poutyne import ClipNorm, EarlyStopping, Model, ModelCheckpoint, OneCycleLR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Series(nn.Module):
    def __init__(self, channels=9, hidden=192, classes=6):
        super().__init__()
        self.convolved = nn.Sequential(
            nn.Conv1d(channels, 64, 8, padding="same"),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Conv1d(64, 128, 5, padding="same"),
        )
        self.recurrent = nn.GRU(128, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Sequential(nn.LayerNorm(2 * hidden), nn.Dropout(0.3), nn.Linear(2 * hidden, classes))

    def forward(self, x):
        states, _ = self.recurrent(self.convolved(x).transpose(1, 2))
        return self.head(states.mean(1))


def data(n):
    return TensorDataset(torch.randn(n, 9, 160), torch.randint(0, 6, (n,)))


train, valid = DataLoader(data(384), batch_size=64, shuffle=True), DataLoader(data(128), batch_size=64)
test = DataLoader(data(100), batch_size=50)
network = Series()
model = Model(
    network,
    torch.optim.AdamW(network.parameters(), lr=1e-3),
    "cross_entropy",
    batch_metrics=["accuracy"],
    epoch_metrics=["f1"],
    device="cuda",
)
history = model.fit_generator(
    train,
    valid,
    epochs=2,
    batches_per_step=2,
    callbacks=[
        ModelCheckpoint("best.pt", monitor="val_acc", mode="max", save_best_only=True, restore_best=True),
        OneCycleLR(max_lr=3e-3, total_steps=12),
        ClipNorm(network.parameters(), 1.0),
        EarlyStopping(patience=2),
    ],
)
print(history[-1])
loss, metrics = model.evaluate_generator(test)
predictions = model.predict_generator(test, has_ground_truth=True, concatenate_returns=True)
print(loss, metrics, predictions.shape)
