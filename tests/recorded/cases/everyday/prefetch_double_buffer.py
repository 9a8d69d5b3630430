"""Two buffers on the card that are filled in turn: pinned staging tensors, `copy_(non_blocking=True)` on a copy stream,
events that say when a buffer is full and when it is free again; a language model with a fixed batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, LENGTH, VOCABULARY, WIDTH, STEPS = 8, 256, 4000, 192, 7


class DoubleBuffer:
    def __init__(self, data, batch, length):
        self.data, self.position = data, 0
        self.stream = torch.cuda.Stream()
        self.staging = [torch.empty(batch, length + 1, dtype=torch.long).pin_memory() for _ in range(2)]
        self.buffers = [torch.empty(batch, length + 1, dtype=torch.long, device="cuda") for _ in range(2)]
        self.full = [torch.cuda.Event() for _ in range(2)]
        self.free = [torch.cuda.Event() for _ in range(2)]
        for event in self.free:
            event.record()
        self.fill(0)

    def fill(self, slot):
        size = self.staging[slot].numel()
        start = self.position % (len(self.data) - size)
        self.full[slot].synchronize()
        self.staging[slot].copy_(self.data[start : start + size].view_as(self.staging[slot]))
        self.position += size
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.free[slot])
            self.buffers[slot].copy_(self.staging[slot], non_blocking=True)
            self.full[slot].record(self.stream)

    def __iter__(self):
        for step in range(STEPS):
            slot = step % 2
            self.fill(1 - slot)
            torch.cuda.current_stream().wait_event(self.full[slot])
            tokens = self.buffers[slot]
            yield tokens[:, :-1], tokens[:, 1:]
            self.free[slot].record()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def main():
    torch.manual_seed(0)
    data = torch.randint(0, VOCABULARY, (STEPS * BATCH * (LENGTH + 1) * 2,))
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    total = torch.zeros((), device="cuda")
    for step, (inputs, targets) in enumerate(DoubleBuffer(data, BATCH, LENGTH)):
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 3 == 2:
            print(step, total.item() / (step + 1))


if __name__ == "__main__":
    main()
