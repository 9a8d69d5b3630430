"""sentence-transformers: pairs with in-batch negatives, sentences turned into vectors."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program


def _model() -> Any:
    """BERT with mean pooling, from a folder, as the package wants it."""
    from sentence_transformers import SentenceTransformer, models

    folder = text.bert_folder()
    text.tokenizer(model_max_length=256).save_pretrained(folder)
    words = models.Transformer(folder, max_seq_length=256)
    pooling = models.Pooling(words.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[words, pooling], device="cuda")


@program("transformers", "sentence_transformers", "datasets", "accelerate")
def sentence_pairs() -> Any:
    """``MultipleNegativesRankingLoss`` on pairs of anchors and positives, then an evaluation by similarity."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
    from transformers import set_seed

    set_seed(42)
    model = _model()
    pairs = {"anchor": text.sentences(48, 8, 40), "positive": text.sentences(48, 20, 180, seed=1)}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=3, logging_steps=1, bf16=True,
            save_strategy="no", report_to=[], disable_tqdm=True, seed=42, train_sampling_strategy="sequential",
        ),
        train_dataset=Dataset.from_dict(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    trainer.train()
    return trainer


@program("transformers", "sentence_transformers")
def sentences_encoded() -> Any:
    from transformers import set_seed

    set_seed(42)
    model = _model()
    vectors = model.encode(
        text.sentences(200, 5, 200), batch_size=32, convert_to_tensor=True, normalize_embeddings=True
    )
    return model, vectors, model.similarity(vectors, vectors)
