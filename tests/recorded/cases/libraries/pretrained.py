"""Models that are loaded from a folder, as tutorials load them: placed by ``device_map``, quantised while they load.

Without quantisation transformers loads in four threads, whose order is another in every run: of those two programs the
share of events that match differs from run to run (0.98 to 1.00 seen), the peaks do not.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _four_bit() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _loaded(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(text.llama_folder(), **options)


def _train(model: Any, optimizer: Any) -> Any:
    model.train()
    for _ in range(3):
        tokens = torch.randint(0, text.VOCABULARY, (2, 384), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss


def _adapter(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=_ALL, task_type="CAUSAL_LM", **options)


@program("transformers", "accelerate")
def pretrained_on_the_card() -> Any:
    """Weights go to the card one by one, into memory that was taken for all of them at once."""
    torch.manual_seed(0)
    model = _loaded(dtype=torch.bfloat16, device_map={"": 0})
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-5))


@program("transformers", "accelerate")
def pretrained_auto_generates() -> Any:
    torch.manual_seed(0)
    model = _loaded(dtype="auto", device_map="auto").eval()
    prompt = torch.randint(3, text.VOCABULARY, (1, 24), device="cuda")
    return model, model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


@program("transformers", "accelerate", "peft", "bitsandbytes")
def pretrained_qlora() -> Any:
    """The notebook of bitsandbytes and PEFT: 4 bits, nested, norms in fp32, checkpoints, a paged optimizer."""
    import bitsandbytes
    from peft import get_peft_model, prepare_model_for_kbit_training

    torch.manual_seed(0)
    model = prepare_model_for_kbit_training(_loaded(quantization_config=_four_bit(), device_map={"": 0}))
    model = get_peft_model(model, _adapter())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _train(model, bitsandbytes.optim.PagedAdamW8bit(trainable, lr=2e-4))


@program("transformers", "accelerate", "peft", "bitsandbytes")
def pretrained_eight_bit_lora() -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    torch.manual_seed(0)
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.float16}
    model = get_peft_model(prepare_model_for_kbit_training(_loaded(device_map="auto", **options)), _adapter())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _train(model, torch.optim.AdamW(trainable, lr=2e-4))


@program("transformers", "accelerate", "datasets", "trl", "peft", "bitsandbytes")
def pretrained_qlora_sft() -> Any:
    """``SFTTrainer`` on a model in 4 bits, with a paged optimizer named by its option."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(42)
    trainer = SFTTrainer(
        model=_loaded(quantization_config=_four_bit(), dtype=torch.bfloat16, device_map={"": 0}),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=42, bf16=True, max_length=256,
            optim="paged_adamw_8bit", gradient_checkpointing=True, train_sampling_strategy="sequential",
        ),
        train_dataset=Dataset.from_dict({"text": text.sentences(40, 30, 250)}),
        processing_class=text.tokenizer(),
        peft_config=_adapter(),
    )  # fmt: skip
    trainer.train()
    return trainer


@program("transformers", "accelerate", "peft", "bitsandbytes")
def pretrained_qlora_trainer() -> Any:
    """``Trainer`` with the options of the QLoRA paper's script."""
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

    set_seed(42)
    tokenizer = text.tokenizer()
    rows = [tokenizer(sentence, truncation=True, max_length=256) for sentence in text.sentences(40, 30, 250)]
    rows = [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in rows]
    model = prepare_model_for_kbit_training(_loaded(quantization_config=_four_bit(), device_map="auto"))
    trainer = Trainer(
        model=get_peft_model(model, _adapter(bias="none")),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=42, fp16=True, warmup_steps=1,
            optim="paged_adamw_32bit", train_sampling_strategy="sequential", max_grad_norm=0.3,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    trainer.train()
    return trainer


@program("transformers", "accelerate", "bitsandbytes")
def pretrained_four_bit_generates() -> Any:
    torch.manual_seed(0)
    model = _loaded(quantization_config=_four_bit()).eval()
    prompt = torch.randint(3, text.VOCABULARY, (1, 24), device="cuda")
    return model, model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


def _forwards(config: Any) -> Any:
    """What ``graphmem analyze hf:FOLDER --inference --weights TYPE --dtype bf16 -b 2 -s 256`` is to say."""
    model = _loaded(quantization_config=config, dtype=torch.bfloat16, device_map={"": 0}).eval()
    tokens = torch.zeros((2, 256), dtype=torch.long).to("cuda")
    for _ in range(2):
        with torch.no_grad():
            output = model(input_ids=tokens)
        del output
    return model, tokens


@program("transformers", "accelerate", "bitsandbytes")
def pretrained_nf4_forwards() -> Any:
    from transformers import BitsAndBytesConfig

    return _forwards(
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    )


@program("transformers", "accelerate", "bitsandbytes")
def pretrained_int8_forwards() -> Any:
    from transformers import BitsAndBytesConfig

    return _forwards(BitsAndBytesConfig(load_in_8bit=True))
