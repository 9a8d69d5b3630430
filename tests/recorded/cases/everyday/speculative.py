"""Speculative decoding by hand: a small model drafts, a large one checks; caches are cropped to what was accepted."""

import torch
import torch.nn.functional as F
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM

torch.manual_seed(4)
device = torch.device("cuda")
common = dict(vocab_size=10000, max_position_embeddings=512, rotary_pct=0.25)
target = (
    GPTNeoXForCausalLM(
        GPTNeoXConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, intermediate_size=4096, **common)
    )
    .half()
    .to(device)
    .eval()
)
draft = (
    GPTNeoXForCausalLM(
        GPTNeoXConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024, **common)
    )
    .half()
    .to(device)
    .eval()
)


def softmax(logits, temperature=1.0):
    return F.softmax(logits.float() / temperature, dim=-1)


@torch.inference_mode()
def speculate(ids, new_tokens, gamma=4):
    target_cache, draft_cache = DynamicCache(), DynamicCache()
    target(ids[:, :-1], past_key_values=target_cache)
    draft(ids[:, :-1], past_key_values=draft_cache)
    goal, rounds = ids.shape[1] + new_tokens, 0
    while ids.shape[1] < goal:
        n = ids.shape[1]
        proposal, q = ids, []
        for _ in range(gamma):
            feed = proposal[:, draft_cache.get_seq_length() :]
            probs = softmax(draft(feed, past_key_values=draft_cache).logits[:, -1])
            q.append(probs)
            proposal = torch.cat([proposal, torch.argmax(probs, -1, keepdim=True)], 1)
        logits = target(proposal[:, target_cache.get_seq_length() :], past_key_values=target_cache).logits
        p = softmax(logits[:, -gamma - 1 :])
        accepted = gamma if rounds % 2 == 0 else 2  # a fixed schedule, so that the run can be repeated
        if accepted == gamma:
            last = p[:, -1].argmax(-1, keepdim=True)
        else:
            rest = torch.clamp(p[:, accepted] - q[accepted], min=0)
            last = (rest / rest.sum(-1, keepdim=True)).argmax(-1, keepdim=True)
        ids = torch.cat([proposal[:, : n + accepted], last], 1)
        target_cache.crop(-(target_cache.get_seq_length() - (ids.shape[1] - 1)))
        draft_cache.crop(min(0, ids.shape[1] - 1 - draft_cache.get_seq_length()))
        rounds += 1
    return ids, rounds


for prompt_length, batch in ((32, 1), (200, 1), (64, 4)):
    out, rounds = speculate(torch.randint(0, 10000, (batch, prompt_length), device=device), 60)
    print(out.shape, rounds, torch.cuda.max_memory_allocated() / 2**20)
