"""LitGPT pretrained with Lightning Fabric as its own script does: accumulation, bf16-true, chunked loss, a KV cache."""

import math
import tempfile
from pathlib import Path

import lightning as L
import torch
from litgpt import GPT, Config
from litgpt.generate.base import generate
from litgpt.lora import GPT as LoRAGPT
from litgpt.lora import Config as LoRAConfig
from litgpt.lora import lora_filter, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy, num_parameters
from torch.utils.data import DataLoader

SIZES = dict(
    block_size=256, vocab_size=1000, padding_multiple=64, n_layer=4, n_head=8, n_query_groups=2, n_embd=256,
    rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    intermediate_size=704,
)  # fmt: skip


def lr_at(step, base=3e-4, warmup=2, most=8):
    return base * (step + 1) / warmup if step < warmup else base * 0.5 * (1 + math.cos(math.pi * step / most))


def fit(fabric, model, optimizer, train, val, accumulate, epochs):
    step = 0
    for epoch in range(epochs):
        for i, ids in enumerate(train):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step)
            inputs, targets = ids[:, :-1].contiguous().long(), ids[:, 1:].contiguous().long()
            is_accumulating = (i + 1) % accumulate != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                logits = model(inputs)
                loss = chunked_cross_entropy(logits, targets, chunk_size=64)
                fabric.backward(loss / accumulate)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        model.eval()
        with torch.no_grad():
            losses = torch.zeros(len(val), device=fabric.device)
            for k, ids in enumerate(val):
                losses[k] = chunked_cross_entropy(model(ids[:, :-1].long()), ids[:, 1:].long(), chunk_size=0)
        fabric.print(epoch, step, losses.mean().item())
        model.train()


def main():
    fabric = L.Fabric(accelerator="cuda", devices=1, precision="bf16-true")
    fabric.launch()
    fabric.seed_everything(1337)
    data = torch.randint(0, 1000, (36, 257))
    train, val = DataLoader(data[:28], batch_size=4, shuffle=True), DataLoader(data[28:], batch_size=4)
    with fabric.init_module(empty_init=False):
        model = GPT(Config(name="tiny-llama", **SIZES))
    fabric.print(f"{num_parameters(model):,}")
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    train, val = fabric.setup_dataloaders(train, val)
    fit(fabric, model, optimizer, train, val, 2, 2)
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(Path(folder) / "lit_model.pth", {"model": model, "optimizer": optimizer})
        fabric.load(Path(folder) / "lit_model.pth", {"model": model, "optimizer": optimizer})
        weights = {name: value.cpu() for name, value in model.module.state_dict().items()}
    with fabric.init_tensor():
        model.set_kv_cache(batch_size=1)
    model.eval()
    with torch.inference_mode():
        prompt = torch.randint(0, 1000, (16,), device=fabric.device)
        print(generate(model, prompt, max_returned_tokens=48, temperature=0.8, top_k=50).shape)
    model.clear_kv_cache()
    del model, optimizer
    with fabric.init_module(empty_init=True):
        adapted = LoRAGPT(
            LoRAConfig(name="tiny-llama", lora_r=8, lora_alpha=16, lora_query=True, lora_value=True, **SIZES)
        )
    adapted.load_state_dict(weights, strict=False)
    mark_only_lora_as_trainable(adapted)
    adapted = fabric.setup(adapted)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-4)
    fit(fabric, adapted, fabric.setup_optimizers(optimizer), train, val, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(Path(folder) / "lora.pth", {"model": adapted}, filter={"model": lora_filter})


if __name__ == "__main__":
    main()
