"""Whisper fine-tuned on pairs of sound and text (whisper): teacher forcing, a frozen encoder at first, then decoding."""

import argparse

import torch
import whisper
from torch import nn
from torch.utils.data import DataLoader, Dataset
from whisper.model import ModelDimensions, Whisper

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=3)
parser.add_argument("--accum", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(0)
DIMS = ModelDimensions(
    n_mels=80, n_audio_ctx=1500, n_audio_state=192, n_audio_head=3, n_audio_layer=2,
    n_vocab=51865, n_text_ctx=448, n_text_state=192, n_text_head=3, n_text_layer=2,
)  # fmt: skip


class Spoken(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        draws = torch.Generator().manual_seed(self.seed + i)
        wave = whisper.pad_or_trim(torch.randn(16000 * (2 + i % 4), generator=draws) * 0.1)
        words = torch.randint(0, 50000, (10 + 3 * (i % 5),), generator=draws).tolist()
        return whisper.log_mel_spectrogram(wave), [50258, 50259, 50359, 50363, *words, 50257]


def collate(batch):
    mels, texts = zip(*batch)
    longest = max(map(len, texts)) - 1
    tokens = torch.full((len(texts), longest), 50257)
    labels = torch.full((len(texts), longest), -100)
    for i, text in enumerate(texts):
        tokens[i, : len(text) - 1], labels[i, : len(text) - 1] = torch.tensor(text[:-1]), torch.tensor(text[1:])
    return torch.stack(mels), tokens, labels


train = DataLoader(Spoken(18, 0), batch_size=args.batch_size, shuffle=True, collate_fn=collate)
valid = DataLoader(Spoken(6, 1000), batch_size=args.batch_size, collate_fn=collate)
model = Whisper(DIMS).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-6, weight_decay=0.01)
steps = args.epochs * len(train) // args.accum
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, total_steps=steps + 1)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(args.epochs):
    model.train()
    for parameter in model.encoder.parameters():
        parameter.requires_grad = epoch > 0
    for i, (mels, tokens, labels) in enumerate(train):
        mels, tokens, labels = mels.cuda(), tokens.cuda(), labels.cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model.decoder(tokens, model.encoder(mels))
            loss = criterion(logits.view(-1, logits.size(-1)), labels.view(-1))
        scaler.scale(loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    with torch.no_grad():
        losses = []
        for mels, tokens, labels in valid:
            logits = model.logits(tokens.cuda(), model.embed_audio(mels.cuda()))
            losses.append(criterion(logits.flatten(0, 1), labels.cuda().flatten()).item())
    print(f"epoch {epoch} train {loss.item():.3f} valid {sum(losses) / len(losses):.3f}")
    torch.save({"dims": DIMS.__dict__, "model_state_dict": model.state_dict()}, f"whisper-{epoch}.pt")

# greedy, token by token
with torch.no_grad():
    audio = model.embed_audio(torch.stack([Spoken(2, 5)[i][0] for i in range(2)]).cuda())
    said = torch.full((2, 1), 50258, device="cuda")
    for _ in range(12):
        said = torch.cat([said, model.logits(said, audio)[:, -1].argmax(-1, keepdim=True)], dim=1)
print("tokens", tuple(said.shape))
