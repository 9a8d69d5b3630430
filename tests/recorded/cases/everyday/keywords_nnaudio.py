"""Spoken words by a spectrogram that is trained with the network (nnAudio): a cycle of rates, mixed precision."""

import torch
from nnAudio.features import CQT1992v2, MelSpectrogram
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
WORDS, RATE = 12, 16000


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel = MelSpectrogram(sr=RATE, n_fft=512, n_mels=64, hop_length=160, trainable_mel=True, verbose=False)
        self.cqt = CQT1992v2(sr=RATE, hop_length=160, fmin=110, n_bins=60, verbose=False)
        self.body = nn.Sequential(
            *(self.block(a, b) for a, b in ((2, 32), (32, 64), (64, 128))), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, WORDS))

    @staticmethod
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x):
        mel, cqt = self.mel(x)[:, :60], self.cqt(x)
        n = min(mel.shape[-1], cqt.shape[-1])
        picture = torch.stack([(mel[..., :n] + 1e-6).log(), (cqt[..., :n] + 1e-6).log()], 1)
        return self.head(self.body(picture))


train = DataLoader(TensorDataset(torch.randn(160, RATE), torch.randint(0, WORDS, (160,))), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(torch.randn(48, RATE), torch.randint(0, WORDS, (48,))), batch_size=24)
model = Words().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=2 * len(train))
scaler = torch.amp.GradScaler("cuda")
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for epoch in range(2):
    model.train()
    for sound, word in train:
        sound, word = sound.cuda(), word.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(sound), word)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    model.eval()
    confusion = torch.zeros(WORDS, WORDS, dtype=torch.long)
    with torch.no_grad():
        for sound, word in test:
            guess = model(sound.cuda()).argmax(1).cpu()
            confusion.index_put_((word, guess), torch.ones_like(word), accumulate=True)
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {confusion.diag().sum().item() / 48:.2%}")
torch.save(model.state_dict(), "words.pt")
