"""Decoding by hand with a key-value cache: top-k and nucleus sampling with stop at EOS, then beam search."""

import time

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
EOS = 2
config = LlamaConfig(
    vocab_size=16000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=1024,
)
model = LlamaForCausalLM(config).to("cuda", dtype=torch.bfloat16).eval()


def filter_logits(logits, top_k=50, top_p=0.95):
    kth = torch.topk(logits, top_k)[0][..., -1, None]
    logits = logits.masked_fill(logits < kth, float("-inf"))
    sorted_logits, sorted_indices = torch.sort(logits, descending=True)
    cumulative = torch.cumsum(F.softmax(sorted_logits, dim=-1), dim=-1)
    remove = cumulative > top_p
    remove[..., 1:] = remove[..., :-1].clone()
    remove[..., 0] = 0
    return logits.masked_fill(remove.scatter(1, sorted_indices, remove), float("-inf"))


@torch.no_grad()
def sample(prompt, max_new_tokens, temperature=0.8):
    past, ids = None, prompt
    generated = prompt
    finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits = filter_logits(out.logits[:, -1, :].float() / temperature)
        ids = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
        ids = torch.where(finished[:, None], torch.full_like(ids, EOS), ids)
        finished |= ids.squeeze(1) == EOS
        generated = torch.cat([generated, ids], dim=1)
        if finished.all():
            break
    return generated


@torch.inference_mode()
def beam_search(prompt, beams, steps):
    out = model(prompt, use_cache=True)
    logp = F.log_softmax(out.logits[:, -1].float(), -1)
    scores, tokens = logp.topk(beams)
    seqs = torch.cat([prompt.repeat(beams, 1), tokens.view(-1, 1)], 1)
    past = out.past_key_values
    past.batch_repeat_interleave(beams)
    scores = scores.view(-1)
    for _ in range(steps - 1):
        out = model(seqs[:, -1:], past_key_values=past, use_cache=True)
        past = out.past_key_values
        total = scores[:, None] + F.log_softmax(out.logits[:, -1].float(), -1)
        scores, flat = total.view(-1).topk(beams)
        parent, token = flat // total.size(1), flat % total.size(1)
        seqs = torch.cat([seqs[parent], token[:, None]], 1)
        past.reorder_cache(parent)
    return seqs[scores.argmax()]


prompt = torch.randint(3, 16000, (8, 100), device="cuda")
t = time.perf_counter()
text = sample(prompt, 100)
torch.cuda.synchronize()
print(
    text.shape,
    f"{text.numel() / (time.perf_counter() - t):.0f} tok/s",
    torch.cuda.max_memory_allocated() // 2**20,
    "MiB",
)
best = beam_search(prompt[:1, :40], 5, 30)
print(best.shape)
