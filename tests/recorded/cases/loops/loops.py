"""Loops around the step: evaluation, losses kept, loaders, autocast, generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.recorded.cases.loops.networks import Transformer, convolutional, images, loss_of, tokens, transformers_model
from tests.recorded.cases.loops.registry import (
    BF16,
    FP16,
    ITERATIONS,
    Loop,
    add,
    case,
    constant_values,
    group,
    is_captured,
    running_generation,
    train,
)

_O = torch.optim

group("loops")


def evaluated(mode: Callable[[], Any], train_after: bool = True) -> Loop:
    model = Transformer(dropout=0.1).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        model.train()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with mode():
            output = model(x)
            accuracy = (output.argmax(-1) == y).float().mean().item()
            total = loss_of(output, y)
    del accuracy, total
    yield


add("evaluation_no_grad", partial(evaluated, torch.no_grad))
add("evaluation_inference_mode", partial(evaluated, torch.inference_mode))


def losses(keep: Callable[[Tensor], Any]) -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    history = []
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(keep(loss))
    yield


add("loss_kept", partial(losses, lambda loss: loss))
add("loss_item", partial(losses, lambda loss: loss.item()))
add("loss_detached", partial(losses, lambda loss: loss.detach()))
add("loss_to_cpu", partial(losses, lambda loss: loss.detach().cpu()))


@case("loss_kept_without_backward")
def loss_kept_without_backward() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    total: Any = 0.0
    for _ in range(ITERATIONS):
        total += loss_of(model(x), y)
    total.backward()
    yield


@case("running_loss")
def running_loss() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    running: Any = 0.0
    for _ in range(ITERATIONS):
        output = model(x)
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
    yield


@case("output_kept_until_next")
def output_kept_until_next() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("empty_cache")
def empty_cache() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        torch.cuda.empty_cache()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    yield


def loader(pin: bool) -> Loop:
    model = Transformer().cuda()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        x, y = tokens("cpu")
        if pin:
            x, y = x.pin_memory(), y.pin_memory()
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("loader", partial(loader, False))
add("loader_pinned", partial(loader, True))


@case("real_data_loader")
def real_data_loader() -> Loop:
    x, y = images("cpu")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    model = convolutional().cuda()
    optimizer = _O.AdamW(model.parameters())
    for inputs, targets in data:
        inputs, targets = inputs.cuda(), targets.cuda()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


def autocast(context: Callable[[], Any], inner: Callable[[], Any] | None = None, whole: bool = False) -> Loop:
    def wrap(block: nn.Module, x: Tensor) -> Tensor:
        with inner():
            return block(x.float())

    model = Transformer(wrap=wrap if inner is not None else None).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with context():
            loss = loss_of(model(x), y)
            if whole:
                loss.backward()
        if not whole:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


_amp = partial(torch.autocast, "cuda", BF16)
add("autocast", partial(autocast, _amp))
add("autocast_backward_inside", partial(autocast, _amp, None, True))
add("autocast_nested", partial(autocast, _amp, partial(torch.autocast, "cuda", FP16)))
add("autocast_disabled_region", partial(autocast, _amp, partial(torch.autocast, "cuda", enabled=False)))
add("autocast_no_cache", partial(autocast, partial(_amp, cache_enabled=False)))
add("autocast_decorator_default", partial(autocast, partial(torch.autocast, "cuda")))
add("autocast_inner_only", partial(autocast, contextlib.nullcontext, _amp))


@case("autocast_accumulation")
def autocast_accumulation() -> Loop:
    model = Transformer(tied=True).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with _amp():
            for _ in range(2):
                loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("autocast_evaluation")
def autocast_evaluation() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with _amp():
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), _amp():
            output = model(x)
        with torch.inference_mode(), _amp():
            output = model(x)
    del output
    yield


@case("default_device")
def default_device() -> Loop:
    torch.set_default_device("cuda")
    try:
        model = Transformer()
        x, y = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int64)
        optimizer = _O.AdamW(model.parameters())
        for _ in range(ITERATIONS):
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_device(None)
    yield


@case("built_on_device")
def built_on_device() -> Loop:
    with torch.device("cuda"):
        model = Transformer(dropout=0.1)
        net = convolutional()
        x, y = torch.zeros(4, 64, dtype=torch.int64), torch.randint(520, (4, 64))
    optimizer = _O.AdamW([*model.parameters(), *net.parameters()])
    yield train(model, x, y, optimizer)


@case("scheduler")
def scheduler() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    warm = _O.lr_scheduler.LinearLR(optimizer, total_iters=2)
    cosine = _O.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        warm.step()
        cosine.step()
        optimizer.zero_grad()
    yield


@case("adversarial")
def adversarial() -> Loop:
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 48)).cuda()
    discriminator = nn.Sequential(nn.Linear(48, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).cuda()
    for_generator = _O.Adam(generator.parameters())
    for_discriminator = _O.Adam(discriminator.parameters())
    real = torch.zeros(32, 48, device="cuda")
    ones, zeros = torch.ones(32, 1, device="cuda"), torch.zeros(32, 1, device="cuda")
    for _ in range(ITERATIONS):
        fake = generator(torch.randn(32, 16, device="cuda"))
        for_discriminator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        loss.backward()
        for_discriminator.step()
        for_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        loss.backward()
        for_generator.step()
    yield


@case("distillation")
def distillation() -> Loop:
    teacher, student = Transformer().cuda().eval(), Transformer(dropout=0.1).cuda()
    x, _ = tokens()
    optimizer = _O.AdamW(student.parameters())
    for _ in range(ITERATIONS):
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, -1)
        loss = F.kl_div(F.log_softmax(student(x) / 2, -1), wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("greedy_generation")
def greedy_generation() -> Loop:
    model = transformers_model(dtype=BF16).cuda().eval()
    current, past = torch.zeros(2, 16, dtype=torch.int64, device="cuda"), None
    generated = [current]
    with torch.no_grad():
        for _ in range(6):
            output = model(input_ids=current, past_key_values=past, use_cache=True)
            past = output.past_key_values
            current = output.logits[:, -1:].argmax(-1)
            generated.append(current)
    result = torch.cat(generated, 1)
    del result
    yield


def generated(train: bool = False, dtype: torch.dtype = BF16, **options: Any) -> Loop:
    """Generation to a fixed length, alone or after every training iteration."""
    model = transformers_model(dtype=dtype).cuda()
    prompt = torch.ones(2, 16, dtype=torch.int64, device="cuda")
    optimizer = _O.AdamW(model.parameters())
    results = []
    for _ in range(2):
        if train:
            model.train()
            model(input_ids=prompt, labels=prompt, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with contextlib.nullcontext() if is_captured(model) else running_generation():
            results.append(model.generate(prompt, max_new_tokens=5, pad_token_id=0, **options))
    yield results


add("generate", partial(generated, do_sample=False), true_values=True)
add("generate_between_iterations", partial(generated, True, torch.float32, do_sample=False), true_values=True)
add("generate_without_cache", partial(generated, do_sample=False, use_cache=False), true_values=True)
add("generate_sampled", partial(generated, do_sample=True, top_k=20), true_values=True)
add(
    "generate_with_logits",
    partial(generated, do_sample=False, return_dict_in_generate=True, output_logits=True),
    true_values=True,
)


def evaluated_with_gradients() -> Loop:
    """Evaluation without no_grad: the graph of the last output lives until the next one."""
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        model.train()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        output = model(x)
    del output
    yield


add("evaluation_with_gradients", evaluated_with_gradients)


@case("policy_gradient")
def policy_gradient() -> Loop:
    """Distributions, which check their parameters and samples: true on a card whose device has values."""
    model = convolutional().cuda()
    x, _ = images()
    optimizer = _O.Adam(model.parameters())
    with contextlib.nullcontext() if is_captured(model) else constant_values(truth=True):
        for _ in range(ITERATIONS):
            scores = model(x)
            actions = torch.distributions.Categorical(logits=scores)
            mean, scale = scores.chunk(2, -1)
            continuous = torch.distributions.Normal(mean, scale.exp())
            chances = actions.log_prob(actions.sample()) + continuous.log_prob(continuous.rsample()).sum(-1)
            loss = -chances.mean() - 0.01 * actions.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    yield loss
