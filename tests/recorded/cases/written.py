"""Training loops as people write them by hand, and the options of the built-in step that ask for the same.

Every loop is a program of its own, in the words of the frameworks' documentation; nothing is shared between them but
the models and the batches, so that none can inherit another's mistake.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_embd": 256, "n_head": 4}
_T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 3, "d_model": 256, "d_kv": 64,
    "d_ff": 512, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_hidden_layers": 4,
    "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``config`` is a transformers configuration, or None for :func:`network`; ``step`` holds fields of
    :class:`graphmem.Training`. Instead, ``given`` makes what ``analyze`` is given: a module or factory, and inputs."""

    name: str
    program: Callable[[], Any]
    config: Mapping[str, Any] | None
    step: Mapping[str, Any]
    batch: int
    seq_len: int | None = None
    iterations: int | None = None
    needs: tuple[str, ...] = field(default=("transformers",))
    given: Callable[[], tuple[Any, Any]] | None = None


CASES: dict[str, Case] = {}


def _case(config: Mapping[str, Any] | None, batch: int, seq_len: int | None = None, **options: Any) -> Any:
    iterations, given = options.pop("iterations", 3), options.pop("given", None)

    def add(program: Callable[[], Any]) -> Callable[[], Any]:
        name = program.__name__
        needs = ("transformers",) if config is not None else ()
        CASES[name] = Case(name, program, config, options, batch, seq_len, iterations, needs, given)
        return program

    return add


def model_of(config: Mapping[str, Any]) -> Any:
    """The transformers model of a configuration, on the host."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        loaded = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config["architectures"][0])(loaded)


def _tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.zeros((rows, length), dtype=torch.long),
        "labels": torch.zeros((rows, length), dtype=torch.long),
    }


class Language(nn.Module):
    """A model that gives its scores and leaves the loss to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 256)
        self.hidden = nn.Linear(256, 512)
        self.head = nn.Linear(512, 20000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(functional.gelu(self.hidden(self.embedding(ids))))


def _scored(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))


def network(batch: int, seq_len: int) -> tuple[Any, ...]:
    """The factory of :class:`Language`, as ``graphmem analyze FILE:network`` calls it."""
    ids = torch.zeros((batch, seq_len), dtype=torch.long)
    return Language(), ids, torch.zeros((batch, seq_len), dtype=torch.long), _scored


# --- the same batch again and again -----------------------------------------------------------------------------------


@_case(_GPT2, 8, 128)
def held() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 8, 128, loop="drop")
def dropped() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return model, optimizer, batch


@_case(_T5, 16, 128, optimizer="sgd", optimizer_args=(("momentum", 0.9),))
def encoder_decoder_held() -> Any:
    model = model_of(_T5).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(16, 128).items()}
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(None, 8, 256, optimizer="adam")
def criterion_held() -> Any:
    model = Language().to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model.train()
    ids = torch.zeros((8, 256), dtype=torch.long).to("cuda")
    targets = torch.zeros((8, 256), dtype=torch.long).to("cuda")
    for _ in range(3):
        output = model(ids)
        loss = _scored(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, ids, targets, output, loss


@_case(_GPT2, 8, 128, amp="fp16", clip_grad_norm=1.0, lr_scheduler="linear")
def scaler_clipping_scheduler() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            outputs = model(**batch)
            loss = outputs.loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 8, 128, grad_scaler=True, loop="drop", lr_scheduler="OneCycleLR", optimizer="sgd",
       optimizer_args=(("momentum", 0.9),))  # fmt: skip
def scaler_without_autocast_dropped() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        del loss
    return model, optimizer, batch


@_case(_BERT, 16, 256, amp="fp16", grad_scaler=False, lr_scheduler="reduce_lr_on_plateau")
def half_precision_without_scaler() -> Any:
    model = model_of(_BERT).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    model.train()
    batch = {
        "input_ids": torch.zeros((16, 256), dtype=torch.long).to("cuda"),
        "labels": torch.zeros(16, dtype=torch.long).to("cuda"),
    }
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            outputs = model(**batch)
            loss = outputs.loss
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 4, 128, amp="bf16", grad_accum=4, clip_grad_norm=1.0)
def accumulation() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(4, 128).items()}
    for number in range(12):
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(**batch)
            loss = outputs.loss
        loss = loss / 4
        loss.backward()
        if (number + 1) % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 8, 128, zero_grad_at="before_forward")
def gradients_kept_until_the_next_forward() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 8, 128, zero_grad_at="before_backward")
def gradients_kept_through_the_forward() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 8, 128, zero_grad_at="before_forward", zero_grad="zeros")
def gradients_zeroed_before_the_forward() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _tokens(8, 128).items()}
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
    return model, optimizer, batch, outputs, loss


# --- a loader's batches -----------------------------------------------------------------------------------------------


@_case(_GPT2, 10, seq_lens=(100, 128, 115), iterations=None)
def lengths() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    for _epoch in range(2):
        for batch in (_tokens(10, length) for length in (100, 128, 115)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 10, seq_lens=(120, 128, 126), iterations=None, loop="drop")
def lengths_dropped() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    for _epoch in range(2):
        for batch in (_tokens(10, length) for length in (120, 128, 126)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return model, optimizer, batch


def _padded(rows: int, length: int) -> dict[str, torch.Tensor]:
    """A tokenizer's batch, as ``DataCollatorWithPadding`` leaves it: the last text was the shortest."""
    mask = torch.ones((rows, length), dtype=torch.long)
    mask[-1, length // 2 :] = 0
    tokens = _tokens(rows, length)
    return {"input_ids": tokens["input_ids"], "attention_mask": mask, "labels": tokens["labels"]}


@_case(_GPT2, 8, 128, attention_mask="ones")
def mask_that_hides_nothing() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    tokens = _tokens(8, 128)
    batch = {"input_ids": tokens["input_ids"], "attention_mask": torch.ones((8, 128), dtype=torch.long),
             "labels": tokens["labels"]}  # fmt: skip
    batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_BERT, 16, 256, attention_mask="padded", amp="bf16")
def padded_sentences() -> Any:
    model = model_of(_BERT).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = _padded(16, 256) | {"labels": torch.zeros(16, dtype=torch.long)}
    batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(**batch)
            loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_T5, 16, 128, attention_mask="padded")
def padded_encoder() -> Any:
    model = model_of(_T5).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    batch = {name: tensor.to("cuda") for name, tensor in _padded(16, 128).items()}
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 10, seq_lens=(100, 128, 115), attention_mask="padded", iterations=None)
def padded_lengths() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    for _epoch in range(2):
        for batch in (_padded(10, length) for length in (100, 128, 115)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(None, 8, seq_lens=(200, 256), iterations=None, optimizer="adam")
def lengths_of_a_factory() -> Any:
    model = Language().to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model.train()
    for _epoch in range(2):
        for length in (200, 256):
            ids, targets = torch.zeros((8, length), dtype=torch.long), torch.zeros((8, length), dtype=torch.long)
            ids, targets = ids.to("cuda"), targets.to("cuda")
            output = model(ids)
            loss = _scored(output, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, ids, targets, output, loss


@_case(_GPT2, 10, 128, last_batch=3, steps_per_epoch=3, iterations=None)
def smaller_last_batch() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    for _epoch in range(2):
        for batch in (_tokens(rows, 128) for rows in (10, 10, 3)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss


@_case(_GPT2, 8, 128, eval_batches=2, eval_batch_size=16, steps_per_epoch=2, iterations=None)
def evaluation() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        model.train()
        for batch in (_tokens(8, 128) for _ in range(2)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in (_tokens(16, 128) for _ in range(2)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            with torch.no_grad():
                outputs = model(**batch)
    return model, optimizer, batch, outputs, loss


@_case(None, 8, 256, optimizer="adam", eval_batches=2, steps_per_epoch=2, iterations=None, loop="drop")
def evaluation_dropped() -> Any:
    model = Language().to("cuda")
    optimizer = torch.optim.Adam(model.parameters())

    def evaluate() -> None:
        model.eval()
        for _ in range(2):
            ids, targets = torch.zeros((8, 256), dtype=torch.long), torch.zeros((8, 256), dtype=torch.long)
            ids, targets = ids.to("cuda"), targets.to("cuda")
            with torch.no_grad():
                _scored(model(ids), targets)

    for _epoch in range(2):
        model.train()
        for _ in range(2):
            ids, targets = torch.zeros((8, 256), dtype=torch.long), torch.zeros((8, 256), dtype=torch.long)
            ids, targets = ids.to("cuda"), targets.to("cuda")
            loss = _scored(model(ids), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        del ids, targets
        evaluate()
    return model, optimizer


@_case(
    _GPT2, 6, amp="bf16", grad_accum=2, clip_grad_norm=1.0, lr_scheduler="CosineAnnealingLR", seq_lens=(96, 128, 112),
    last_batch=2, eval_batches=2, eval_batch_size=12, steps_per_epoch=3, zero_grad_at="before_forward",
    iterations=None,
)  # fmt: skip
def everything() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _epoch in range(2):
        model.train()
        rows_and_lengths = [(6, 96), (6, 128), (6, 112), (6, 96), (6, 128), (2, 112)]
        for number, batch in enumerate(_tokens(rows, length) for rows, length in rows_and_lengths):
            if number % 2 == 0:
                optimizer.zero_grad()
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            with torch.autocast("cuda", torch.bfloat16):
                outputs = model(**batch)
                loss = outputs.loss
            loss = loss / 2
            loss.backward()
            if number % 2 == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
        model.eval()
        for batch in (_tokens(12, length) for length in (96, 128)):
            batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                outputs = model(**batch)
    return model, optimizer, batch, outputs, loss


def source_of(case: Case, folder: Path) -> str:
    """The name that ``graphmem analyze`` takes for the model; its configuration is written into ``folder``."""
    if case.config is None:
        return f"{__name__}:network"
    path = folder / f"{case.name}.json"
    path.write_text(json.dumps(dict(case.config)), encoding="utf-8")
    return f"hf:{path}"


# --- hooks and attributes of the parameters of a module that is given ------------------------------------------------


def hooked() -> Language:
    """A model that descends in its hooks: a table, by parameter, of the optimizers that they step. What is tagged is
    not trained, and the head's gradient is halved."""
    model = Language()
    model.hidden.weight.frozen = True  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.requires_grad_(not hasattr(parameter, "frozen"))
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters() if p.requires_grad}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_now)
    model.head.weight.register_hook(lambda grad: grad * 0.5)
    return model


def _hooked_with_inputs() -> tuple[Any, Any]:
    return hooked(), torch.zeros((8, 128), dtype=torch.long)


@_case(None, 8, optimizer="sgd", given=_hooked_with_inputs)
def module_with_hooks() -> Any:
    model = hooked().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    ids = torch.zeros((8, 128), dtype=torch.long).to("cuda")
    for _ in range(3):
        output = model(ids)
        loss = output.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, ids, output, loss


@_case(None, 8, optimizer="sgd", given=lambda: (_hooked_with_inputs, None))
def factory_with_hooks() -> Any:
    ids = torch.zeros((8, 128), dtype=torch.long)
    model = hooked()
    model.cuda()
    model.train()
    ids = ids.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        output = model(ids)
        loss = output.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, ids, output, loss


# --- batches that are moved ahead on a stream of their own ------------------------------------------------------------


class DataPrefetcher:
    """The prefetcher of NVIDIA's ImageNet example: the next batch is on its way while this one is trained on."""

    def __init__(self, loader: Iterator[dict[str, torch.Tensor]]) -> None:
        self.loader = loader
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self) -> None:
        batch = next(self.loader)
        with torch.cuda.stream(self.stream):
            self.batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}

    def next(self) -> dict[str, torch.Tensor]:
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        for tensor in batch.values():
            tensor.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


@_case(_GPT2, 8, 128, prefetch=1)
def prefetched() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    prefetcher = DataPrefetcher(_tokens(8, 128) for _ in itertools.count())
    for _ in range(3):
        batch = prefetcher.next()
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch, outputs, loss, prefetcher


class Ahead:
    """The next ``count`` batches of a loader are on the card, in a queue, while one is used."""

    def __init__(self, loader: Iterator[Any], count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[Any]:
        stream, waiting = torch.cuda.Stream(), deque[Any]()

        def fetch() -> None:
            for batch in itertools.islice(self.loader, self.count - len(waiting)):
                with torch.cuda.stream(stream):
                    waiting.append({name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()})

        fetch()
        while waiting:
            torch.cuda.current_stream().wait_stream(stream)
            batch = waiting.popleft()
            for tensor in batch.values():
                tensor.record_stream(torch.cuda.current_stream())
            fetch()
            yield batch


def _pairs() -> dict[str, torch.Tensor]:
    return {"ids": torch.zeros((512, 256), dtype=torch.long), "targets": torch.zeros((512, 256), dtype=torch.long)}


@_case(None, 512, 256, prefetch=3, optimizer="sgd", amp="bf16", grad_accum=2, loop="drop", iterations=2)
def prefetched_three_ahead() -> Any:
    model = Language().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    loader = Ahead((_pairs() for _ in itertools.count()), 3)
    for number, batch in enumerate(loader, 1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = _scored(model(batch["ids"]), batch["targets"])
        loss = loss / 2
        loss.backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            del loss
        if number == 4:
            return model, optimizer, batch, loader
    return None


@_case(_GPT2, 10, prefetch=2, seq_lens=(100, 128, 115), eval_batches=3, eval_batch_size=16, iterations=None)
def prefetched_lengths_and_evaluation() -> Any:
    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        model.train()
        for batch in Ahead((_tokens(10, length) for length in (100, 128, 115)), 2):
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in Ahead((_tokens(16, length) for length in (100, 128, 115)), 2):
            with torch.no_grad():
                outputs = model(**batch)
    return model, optimizer, batch, outputs, loss
