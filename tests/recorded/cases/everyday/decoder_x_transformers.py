"""A small decoder of x-transformers: rotary positions, RMSNorm and GLU, trained on random text, then sampled."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(11)
device = "cuda"
model = AutoregressiveWrapper(
    TransformerWrapper(
        num_tokens=512,
        max_seq_len=192,
        attn_layers=Decoder(
            dim=256,
            depth=4,
            heads=4,
            rotary_pos_emb=True,
            use_rmsnorm=True,
            ff_glu=True,
            ff_swish=True,
            attn_flash=True,
        ),
    )
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
text = torch.randint(0, 512, (1 << 14,))
for step in range(6):
    optimizer.zero_grad()
    for _ in range(2):
        starts = torch.randint(0, text.numel() - 193, (8,))
        batch = torch.stack([text[start : start + 193] for start in starts]).to(device)
        loss = model(batch) / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(f"step {step}: loss {loss.item() * 2:.3f}")
model.eval()
prompt = text[:16].unsqueeze(0).to(device)
sample = model.generate(prompt, 24, temperature=1.0)
print(sample[0].tolist())
