"""foundation-model-stack/fms-acceleration, ``scripts/benchmarks``: full fine-tuning by TRL's trainer under accelerate's
FSDP, the scenario without any acceleration.

Arguments: the model, sequences a process, tokens a sequence (texts are packed to it: the published tokens a second
are that many). Every block and the rest are an FSDP unit (``full_shard``, ``BACKWARD_PRE``, original parameters),
read on the host of the first process and sent to the others; activations are checkpointed with reentrant checkpoints,
as Trainer asks by default; the loss is that of transformers 4.45 to 4.48, in 32 bits but for GPTBigCode; Trainer's
AdamW, clipping, and its order of what is freed.
"""

import functools
import os
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeBlock
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

NAME, BATCH, LENGTH = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
#: The fields of the models' public config.json that set sizes.
MODELS = {
    "santacoder": (
        transformers.GPTBigCodeForCausalLM,
        transformers.GPTBigCodeConfig(
            vocab_size=49280, n_embd=2048, n_layer=24, n_head=16, n_inner=8192, n_positions=2048, multi_query=True,
            attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1,
        ),
        GPTBigCodeBlock,
    ),
    "mistral-7b": (transformers.MistralForCausalLM, transformers.MistralConfig(), MistralDecoderLayer),
    "powerlm-3b": (
        transformers.GraniteForCausalLM,
        transformers.GraniteConfig(
            vocab_size=49152, hidden_size=2304, intermediate_size=9216, num_hidden_layers=40, num_attention_heads=36,
            num_key_value_heads=36, max_position_embeddings=4096, tie_word_embeddings=True,
        ),
        GraniteDecoderLayer,
    ),
}  # fmt: skip


def loss_of(logits, labels):
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), targets.view(-1))


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    kind, config, block = MODELS[NAME]
    config.use_cache = False
    config._attn_implementation = "sdpa"
    model = kind(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=True,
        sync_module_states=True,
        limit_all_gathers=True,
        device_id=torch.cuda.current_device(),
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, eps=1e-4, weight_decay=0.01)

    def step(batch):
        output = model(input_ids=batch["input_ids"])
        if NAME != "santacoder":  # in the model: nobody has the bfloat16 ones any more
            output.logits = output.logits.float()
        return loss_of(output.logits, batch["labels"])

    for _ in range(10):
        tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH)).to("cuda")
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        loss = step(batch)
        del batch, tokens
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()


main()
