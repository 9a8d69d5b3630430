"""transformers' ``Trainer``."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program


class _Encoded(torch.utils.data.Dataset):
    """Encoded sentences; a data collator pads them."""

    def __init__(self, tokenizer: Any, sentences: list[str], classes: int = 0) -> None:
        self.rows = [tokenizer(sentence, truncation=True, max_length=256) for sentence in sentences]
        self.classes = classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[index])
        row.pop("token_type_ids", None)
        return row | {"labels": index % self.classes} if self.classes else row


def _arguments(**options: Any) -> Any:
    from transformers import TrainingArguments

    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 8, "per_device_eval_batch_size": 16,
        "max_steps": 3, "learning_rate": 5e-5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 42, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return TrainingArguments(**settings | options)


def _causal(**options: Any) -> Any:
    """A language model on sentences of many lengths, padded to the longest of a batch."""
    from transformers import DataCollatorForLanguageModeling, Trainer, set_seed

    set_seed(42)
    tokenizer = text.tokenizer()
    trainer = Trainer(
        model=text.llama(),
        args=_arguments(**options),
        train_dataset=_Encoded(tokenizer, text.sentences(64, 30, 250)),
        eval_dataset=_Encoded(tokenizer, text.sentences(40, 30, 250, seed=1)),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    return trainer


@program("transformers", "accelerate")
def trainer_causal() -> Any:
    return _causal()


@program("transformers", "accelerate")
def trainer_causal_bf16_checkpointing() -> Any:
    return _causal(bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2)


@program("transformers", "accelerate")
def trainer_causal_evaluates() -> Any:
    trainer = _causal(bf16=True, eval_strategy="steps", eval_steps=2)
    trainer.evaluate()
    return trainer


@program("transformers", "accelerate", compiles=True)
def trainer_causal_compiled() -> Any:
    return _causal(bf16=True, torch_compile=True)


@program("transformers", "accelerate")
def trainer_masked() -> Any:
    """BERT with its words hidden, in fp16 with a gradient scaler."""
    from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, set_seed

    set_seed(42)
    tokenizer = text.tokenizer()
    trainer = Trainer(
        model=BertForMaskedLM(text.bert_config()),
        args=_arguments(fp16=True),
        train_dataset=_Encoded(tokenizer, text.sentences(64, 20, 200)),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )
    trainer.train()
    return trainer


@program("transformers", "accelerate")
def trainer_classifies() -> Any:
    """The course's text classification: dynamic padding, accuracy, evaluation each epoch."""
    from transformers import BertForSequenceClassification, DataCollatorWithPadding, Trainer, set_seed

    set_seed(42)
    tokenizer = text.tokenizer()

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = Trainer(
        model=BertForSequenceClassification(text.bert_config(num_labels=3)),
        args=_arguments(max_steps=-1, num_train_epochs=1, eval_strategy="epoch", warmup_steps=2),
        train_dataset=_Encoded(tokenizer, text.sentences(32, 10, 128), classes=3),
        eval_dataset=_Encoded(tokenizer, text.sentences(24, 10, 128, seed=1), classes=3),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    return trainer


@program("transformers", "accelerate")
def trainer_translates() -> Any:
    """T5 with ``Seq2SeqTrainer``: labels padded with -100."""
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
        set_seed,
    )

    set_seed(42)
    tokenizer = text.tokenizer()
    config = T5Config(
        vocab_size=text.VOCABULARY, d_model=256, d_ff=512, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    sources, targets = text.sentences(40, 10, 100), text.sentences(40, 10, 60, seed=1)
    rows = [tokenizer(source, text_target=target) for source, target in zip(sources, targets, strict=True)]
    rows = [{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in rows]
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=3, save_strategy="no",
            report_to=[], disable_tqdm=True, optim="adafactor", train_sampling_strategy="sequential",
        ),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )  # fmt: skip
    trainer.train()
    return trainer
