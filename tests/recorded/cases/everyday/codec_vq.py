"""A neural codec for speech: residual codes (vector_quantize_pytorch), a loss of spectra (auraloss), resampling (julius)."""

import auraloss
import julius
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset
from vector_quantize_pytorch import ResidualVQ

torch.manual_seed(0)


class Clips(Dataset):
    """Half a second of noise at 44.1 kHz, as at 16 kHz."""

    def __init__(self, n):
        self.resample = julius.ResampleFrac(441, 160)
        self.sound = torch.randn(n, 1, 22050) * 0.1

    def __len__(self):
        return len(self.sound)

    def __getitem__(self, i):
        return self.resample(self.sound[i])[:, :8000]


def unit(a, b, stride, up=False):
    kind = nn.ConvTranspose1d if up else nn.Conv1d
    return nn.Sequential(
        nn.ELU(),
        weight_norm(
            kind(a, b, 2 * stride, stride, stride // 2 + stride % 2, **({"output_padding": stride % 2} if up else {}))
        ),
        nn.ELU(),
        weight_norm(nn.Conv1d(b, b, 3, padding=1)),
    )


class Codec(nn.Module):
    def __init__(self, width=32, strides=(2, 4, 5), dim=128):
        super().__init__()
        widths = [width * 2**i for i in range(len(strides) + 1)]
        self.encoder = nn.Sequential(
            nn.Conv1d(1, width, 7, padding=3), *(unit(*pair, s) for *pair, s in zip(widths, widths[1:], strides))
        )
        self.inner, self.outer = nn.Conv1d(widths[-1], dim, 3, padding=1), nn.Conv1d(dim, widths[-1], 7, padding=3)
        self.quantizer = ResidualVQ(dim=dim, num_quantizers=6, codebook_size=512, decay=0.95, quantize_dropout=True)
        self.decoder = nn.Sequential(
            *(unit(b, a, s, True) for a, b, s in list(zip(widths, widths[1:], strides))[::-1]),
            nn.Conv1d(width, 1, 7, padding=3),
        )

    def forward(self, x):
        z = self.inner(self.encoder(x)).transpose(1, 2)
        q, codes, commitment = self.quantizer(z)
        return self.decoder(self.outer(q.transpose(1, 2))).tanh(), codes, commitment.sum()


codec = Codec().cuda()
spectra = auraloss.freq.MultiResolutionSTFTLoss(
    fft_sizes=[512, 256, 128], hop_sizes=[128, 64, 32], win_lengths=[512, 256, 128], sample_rate=16000
).cuda()
distance = auraloss.time.SISDRLoss()
optimizer = torch.optim.AdamW(codec.parameters(), lr=3e-4, betas=(0.8, 0.99))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
train, test = DataLoader(Clips(48), batch_size=8, shuffle=True, num_workers=2), DataLoader(Clips(8), batch_size=4)
for epoch in range(2):
    codec.train()
    for x in train:
        x = x.cuda()
        y, codes, commitment = codec(x)
        n = min(x.shape[-1], y.shape[-1])
        loss = spectra(y[..., :n], x[..., :n]) + nn.functional.l1_loss(y[..., :n], x[..., :n]) + 0.25 * commitment
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(codec.parameters(), 5.0)
        optimizer.step()
    scheduler.step()
    codec.eval()
    with torch.no_grad():
        pairs = [(codec(x.cuda())[0].cpu(), x) for x in test]
    score = sum(distance(y[..., :7900], x[..., :7900]).item() for y, x in pairs) / len(pairs)
    print(f"epoch {epoch} loss {loss.item():.3f} SI-SDR {-score:.2f} used {codes.unique().numel()} codes")
    torch.save(codec.state_dict(), "codec.pt")
