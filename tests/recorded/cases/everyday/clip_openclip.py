"""OpenCLIP trained on image-caption pairs: its CLIP, ClipLoss, tokenizer, cosine schedule and bf16, then zero-shot."""

import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from open_clip import CLIP, ClipLoss, SimpleTokenizer
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from torch.utils.data import DataLoader, Dataset

NOUNS = ["a red square", "a blue circle", "a green cat", "a dog on grass", "an old car"]


class Pairs(Dataset):
    def __init__(self, n, tokenizer, seed):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(0, len(NOUNS), n)
        self.images = (rng.normal(size=(n, 3, 96, 96)) + self.kinds[:, None, None, None]).astype(np.float32)
        self.texts = tokenizer([f"a photo of {NOUNS[k]}" for k in self.kinds])

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, i):
        return torch.from_numpy(self.images[i]), self.texts[i]


def cosine_lr(optimizer, base, warmup, steps):
    def adjust(step):
        lr = base * (step + 1) / warmup if step < warmup else 0.5 * (1 + np.cos(np.pi * (step - warmup) / steps)) * base
        for group in optimizer.param_groups:
            group["lr"] = lr

    return adjust


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = SimpleTokenizer(context_length=32)
    model = CLIP(
        embed_dim=256,
        vision_cfg=CLIPVisionCfg(layers=4, width=256, head_width=64, patch_size=16, image_size=96),
        text_cfg=CLIPTextCfg(context_length=32, vocab_size=tokenizer.vocab_size, width=256, heads=4, layers=3),
    ).to(device)
    model.set_grad_checkpointing(True)
    train = DataLoader(Pairs(70, tokenizer, 0), batch_size=32, shuffle=True, drop_last=True)
    val = DataLoader(Pairs(40, tokenizer, 1), batch_size=32)
    gains = [p for n, p in model.named_parameters() if p.ndim < 2 or "bn" in n or "ln" in n or "logit_scale" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim < 2 or "bn" in n or "ln" in n or "logit_scale" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": gains, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}], lr=5e-4, betas=(0.9, 0.98)
    )
    scheduler = cosine_lr(optimizer, 5e-4, 2, 6)
    loss_fn = ClipLoss()
    step = 0
    for epoch in range(3):
        model.train()
        for images, texts in train:
            images = images.to(device=device, non_blocking=True)
            texts = texts.to(device=device, non_blocking=True)
            scheduler(step)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(images, texts)
                loss = loss_fn(*out)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, float(np.log(100)))
            step += 1
        model.eval()
        image_features, text_features = [], []
        with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
            for images, texts in val:
                image, text, scale = model(images.to(device), texts.to(device))
                image_features.append(image.cpu())
                text_features.append(text.cpu())
        logits = 100.0 * torch.cat(image_features) @ torch.cat(text_features).t()
        rank = (logits.argsort(1, descending=True) == torch.arange(len(logits))[:, None]).float().argmax(1)
        print(epoch, float(loss), "median rank", float(rank.median()))
    with tempfile.TemporaryDirectory() as folder:
        state = {"epoch": 3, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.path.join(folder, "epoch_3.pt"))
    with torch.no_grad():
        weights = F.normalize(model.encode_text(tokenizer(NOUNS).to(device)), dim=-1)
        image = torch.randn(8, 3, 96, 96, device=device)
        print((100.0 * model.encode_image(image, normalize=True) @ weights.T).softmax(-1).argmax(-1).tolist())


if __name__ == "__main__":
    main()
