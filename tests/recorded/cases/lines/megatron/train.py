"""A small GPT of megatron-core in its own loop: schedule of micro batches, overlapped gradients, mixed precision."""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, ROWS, VOCABULARY = 256, 4, 4096

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(0)
parallel_state.initialize_model_parallel(1, 1)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=4, hidden_size=512, num_attention_heads=8, use_cpu_initialization=True, bf16=True,
    params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
)  # fmt: skip
model = GPTModel(
    config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope",
).cuda().bfloat16()  # fmt: skip
model = DistributedDataParallel(
    config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True), model
)
config.finalize_model_grads_func = finalize_model_grads
optimizer = get_megatron_optimizer(
    OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0), [model]
)
step = get_forward_backward_func()


def batches():
    while True:
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
        yield tokens[:, :-1].cuda(), tokens[:, 1:].cuda()


def loss_of(losses):
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def forward(data, model):
    tokens, labels = next(data)
    positions = torch.arange(LENGTH, device="cuda").expand(ROWS, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=labels), partial(loss_of)


data = batches()
for _ in range(4):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    step(
        forward_step_func=forward, data_iterator=data, model=model, num_microbatches=2, seq_length=LENGTH,
        micro_batch_size=ROWS, forward_only=False,
    )  # fmt: skip
    optimizer.step()
