"""The built-in loop around a wrapped model, against recordings of the programs that the options stand for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from graphmem.analyze import analyze  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from graphmem.training import FullyShard, Inference, PipelineParallel, Training  # noqa: E402
from tests.recorded.cases.sharded import combined, options  # noqa: E402
from tests.recorded.device import CARD  # noqa: E402
from tests.recorded.sharded import KIND  # noqa: E402
from tests.support import packages  # noqa: E402

#: Those that are quick.
FAST = ("option_fsdp", "option_pp_gpipe")


STEPS = options.STEPS | combined.STEPS


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STEPS])
@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_loop_needs_what_its_program_needs(name: str) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    recorded = KIND.load(name)
    factory, batch = (combined if name in combined.STEPS else options).given(name)
    estimate = analyze(factory, batch=batch, training=STEPS[name], device=CARD, iterations=3)
    assert (estimate.peak.allocated_bytes, estimate.peak.reserved_bytes) == (
        recorded.peak_allocated_bytes,
        recorded.peak_reserved_bytes,
    )
    assert bool(estimate.breakdown["PARAMETER"]) != (name == "option_fsdp_hybrid")  # whose shards are on the host


def small(tied: bool = False, batch: int = 3) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    ids = torch.zeros((batch, 30), dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2))
    ids = torch.zeros((2, 16), dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("factory", "step", "message"),
    [
        (small, Training(pp=PipelineParallel(2, "1f1b", 2)), "3 rows, which are not 2 equal micro-batches"),
        (small, Training(pp=PipelineParallel(6)), "6 stages need 4 layers or more, and the model has 2"),
        (small, Training(pp=PipelineParallel(2), optimizer="lbfgs"), "lbfgs needs the loss"),
        (small, Training(pp=PipelineParallel(2, "DualPipeV")), "DualPipeV refuses 3 micro-batches on 2 processes"),
        (lambda: small(tied=True), Training(pp=PipelineParallel(2, "zbv")), "tied embedding"),
        (gpt2, Training(pp=PipelineParallel(2)), "GPT2LMHeadModel has no plan for --pp"),
        (
            lambda: (torch.nn.Linear(2, 2), torch.zeros(2, 2)),
            Training(pp=PipelineParallel(2)),
            "of input_ids and labels",
        ),
        (small, Training(tp=4, sp=True), "30 cannot be cut into 4 equal parts"),
        (gpt2, Training(pp=PipelineParallel(2), tp=2), "has no `tp_plan`"),
        (small, Training(tp=2, fsdp=FullyShard(4), clip_grad_norm=1.0), "gradients are clipped by norms"),
        (gpt2, Training(tp=2, sp=True), "GPT2LMHeadModel is not"),
        (small, Training(tp=2, tp_plan=(("lm_head", "sideways"),)), "Unsupported `tp_plan` styles"),
    ],
)
def test_what_cannot_be_shared_so_is_said(factory: Any, step: Training, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        analyze(factory, training=step, device=CARD)


def test_a_tied_head_is_the_part_of_the_embedding_that_the_process_holds() -> None:
    def allocated(tied: bool, step: Inference | Training) -> int:
        return analyze(lambda: small(tied=tied), training=step, device=CARD, iterations=1).peak.allocated_bytes

    part = 128 // 2 * 32 * 4  # rows of the vocabulary, hidden size, bytes of an element
    assert allocated(False, Inference(tp=2)) - allocated(True, Inference(tp=2)) == part
    step = Training(tp=2, fsdp=FullyShard(4), optimizer_args=(("foreach", False),))
    assert allocated(True, step) > 0


def test_the_processes_of_a_pipeline_differ_and_the_fullest_is_told() -> None:
    step = Training(pp=PipelineParallel(2, "gpipe", 3))
    told = analyze(small, training=step, device=CARD, iterations=1, ranks="all").details["ranks"]
    assert told["analysed"] == [0, 1]
    assert len(told["kinds"]) == 2
