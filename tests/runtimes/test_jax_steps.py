"""Steps of JAX programs, recorded of JAX's CUDA client on the stub driver, against what follows from the programs as
graphmem followed them; and the rules one by one. Needs no JAX, but for the last tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem import analyze
from graphmem.allocators.ideal import IdealAllocator
from graphmem.devices import all_devices, custom_device, device_named
from graphmem.errors import SourceError, UsageError
from graphmem.replay import replay
from graphmem.runtimes.base import Setting
from graphmem.runtimes.jax import RUNTIME
from graphmem.runtimes.jax.assignment import Allocation, Assignment, from_document, read_assignment
from graphmem.runtimes.jax.options import JaxOptions, read_options
from graphmem.runtimes.jax.program import category_of, read_program, returned_bytes, trace_of
from graphmem.runtimes.jax.runtime import GROWN_BYTES, TRIED_BYTES, limit_on
from graphmem.runtimes.jax.target import target_config
from graphmem.sources import jax_function, load
from graphmem.trace import Category
from graphmem.training import Training
from graphmem.units import GIB, MIB
from tests.recorded import jax_steps as steps
from tests.support.examples import examples

#: What differs, and in which figures: XLA's sorts take scratch of CUB that the compiler knows of cards alone, and an
#: array that a file makes takes a scalar besides (docs/modeling/jax.md).
DIFFERS = {
    "sorting": {"peak_bytes_in_use", "largest_alloc_size", "pool_bytes"},
    "closed_over": {"pool_bytes", "num_allocs"},
}


@pytest.mark.parametrize("name", [name for name in steps.recorded() if name not in DIFFERS])
def test_a_recorded_step_is_equal_to_the_byte(name: str) -> None:
    """Bytes in use, their peak, the largest request, the pool, and the number of requests."""
    assert steps.differing(name) == {}


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_is_known(name: str) -> None:
    assert steps.differing(name).keys() == DIFFERS[name]


def test_a_sort_is_told() -> None:
    assert "sort" in read_program(steps.followed("sorting")).executables[0].assignment.kinds


def test_what_is_tried_out_is_told_as_recorded() -> None:
    assert steps.tried() == (list(TRIED_BYTES), list(GROWN_BYTES))


# --- XLA's texts ------------------------------------------------------------------------------------------------------

_ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <3 w.1 @0> (size=4096,offset=0): f32[1024]{0}
 value: <9 fusion.2 @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 4, maybe-live-out:
 value: <8 loss @0> (size=4,offset=0): f32[]
allocation 2: size 16, output shape is |(f32[], f32[1024])|, maybe-live-out:
 value: <10 tuple.1{} @0> (size=16,offset=0): (f32[], f32[1024]{0})
allocation 3: size 4, thread-local:
 value: <1 add.1 @0> (size=4,offset=0): f32[]
allocation 6: size 64, color 5, preallocated-temp:
 value: <11 copy.1 @0> (size=64,offset=0): f32[16]{0:S(5)}
allocation 4: size 12, constant:
 value: <2 constant.7 @0> (size=12,offset=0): f32[3]
allocation 5: size 8192, preallocated-temp:
 value: <5 fusion.1{0} @0> (size=4096,offset=0): f32[1024]{0}
 value: <6 fusion.1{1} @0> (size=4096,offset=4096): f32[1024]{0}
 value: <7 dot.1 @0> (size=2048,offset=0): f32[512]{0}

Total bytes used: 12312
"""
_VALUES = """Used values:
<8 loss @0>
 positions:
  loss
  tuple.1 {0}
 uses:
  tuple.1, operand 0
 from instruction: %loss = f32[] add(%a, %b)
<9 fusion.2 @0>
 positions:
  fusion.2
  tuple.1 {1}
 uses:
  tuple.1, operand 1
 from instruction: %fusion.2 = f32[1024]{0} fusion(%w.1)
<5 fusion.1{0} @0>
 positions:
  fusion.1 {0}
 from instruction: %fusion.1 = fusion(%w.1), metadata={op_name="jit(step)/mul" stack_frame_id=4}
<6 fusion.1{1} @0>
 positions:
  fusion.1 {1}
 from instruction: %fft.9 = f32[2,8]{1,0} fft(%x), fft_type=IRFFT, fft_length={8}
"""
_MODULE = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/step.py"

FileLocations
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}

StackFrames
4 {file_location_id=2 parent_frame_id=1}


ENTRY %main (x: c64[2,5]) -> f32[2,8] {
  %fft.9 = f32[2,8]{1,0} fft(%x), fft_type=IRFFT, fft_length={8}
  %sort.1 = (f32[300,100]{1,0}, s32[300,100]{1,0}) sort(%a, %b), dimensions={1}
  %sort.2 = f32[100]{0} sort(%c), dimensions={0}
}
"""
_RANGES = """HloLiveRange (max 9):
  BufferLiveRange:
    fusion.1{0}:2-4
    fusion.1{1}:2-6
    dot.1{}:5-6
    w.1{}:0-9
  LiveRangePeak:
"""


def test_a_call_is_read_from_xlas_texts() -> None:
    found = read_assignment(_ASSIGNMENT, _VALUES, _RANGES, _MODULE)
    assert found.allocations == (
        Allocation(4096, "parameter", 0, 1),  # donated: the second output is written over it
        Allocation(4, "output", None, 0),
        Allocation(16, "tuple"),
        Allocation(64, "host"),
        Allocation(12, "constant"),
        Allocation(8192, "temporary"),
    )
    assert found.filled_bytes == 8192
    assert found.values[0] == (4096, "jit(step)/mul", "step.py:7", "f32[1024]")
    assert found.scratch == (2 * 5 * 8,)  # the copied input of a transform to real numbers
    assert found.kinds == ("transform", "sort")
    assert from_document(json.loads(json.dumps(found.document()))) == found


@pytest.mark.parametrize("text", ["", "nothing of XLA's", "allocation x: size 1"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match=r"that graphmem cannot read; it reads that of jaxlib 0\.10"):
        read_assignment(text, "", "", "")


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_damaged_texts_are_read_or_refused(data: st.DataObject) -> None:
    """Lines that are missing, twice there, cut, or with other numbers."""
    texts = []
    for text in (_ASSIGNMENT, _VALUES, _RANGES, _MODULE):
        lines = data.draw(st.lists(st.sampled_from(text.splitlines()), max_size=20))
        cut = data.draw(st.integers(0, 40))
        damaged = "\n".join(lines)[: -cut or None]
        digits = data.draw(st.sampled_from(["0", "7", "9" * 30]))
        texts.append(re.sub(data.draw(st.sampled_from("0123456789")), digits, damaged))
    with contextlib.suppress(SourceError):
        found = read_assignment(*texts)
        assert from_document(json.loads(json.dumps(found.document()))) == found


# --- calls ------------------------------------------------------------------------------------------------------------


def _document(*events: list[Any], donates: bool = False) -> dict[str, Any]:
    output = Allocation(800, "parameter", 0, 0) if donates else Allocation(800, "output", None, 0)
    rows = () if donates else (Allocation(800, "parameter", 0),)
    assignment = Assignment((*rows, output, Allocation(16, "tuple"), Allocation(5000, "temporary")))
    executable = {"name": "jit_step", "xla": {"temp": 5000}, **assignment.document()}
    facts = {"jax": "0.10.2", "cards": 1, "iterations": 1, "jitted": True, "reads": 0, "decisions": 0}
    put = ["put", 0, 800, "params['w']", "argument"]
    return {**facts, "executables": [executable], "events": [put, *events]}


def test_a_call_takes_outputs_and_its_block_and_gives_the_block_back() -> None:
    trace = trace_of(read_program(_document(["call", 0, [0], [1]], ["drop", 0])), "step")
    run = replay(trace, IdealAllocator())
    assert run.peak_requested_bytes == 800 + 800 + 16 + 5000
    assert run.allocated_bytes[-1] == 800


def test_a_donated_argument_becomes_the_output() -> None:
    events = (["call", 0, [0], [1]], ["carry", 0, 1], ["drop", 0], ["call", 0, [1], [2]])
    trace = trace_of(read_program(_document(*events, donates=True)), "step")
    assert replay(trace, IdealAllocator()).peak_requested_bytes == 800 + 16 + 5000
    assert trace.storages[0].category is Category.PARAMETER


@pytest.mark.parametrize(("donates", "returned"), [(False, 800), (True, 0)])
def test_arguments_that_come_back_beside_themselves_are_told(donates: bool, returned: int) -> None:
    events = (["iteration", 1], ["call", 0, [0], [1]], ["carry", 0, 1], ["drop", 0], ["iteration", 2])
    assert returned_bytes(read_program(_document(*events, donates=donates))) == returned


def test_an_array_that_was_donated_is_gone() -> None:
    document = _document(["call", 0, [0], [1]], ["call", 0, [0], [2]], donates=True)
    with pytest.raises(SourceError, match="jit_step is called with an array that was donated in a call before"):
        trace_of(read_program(document), "step")


def test_a_document_with_an_error_says_it() -> None:
    with pytest.raises(SourceError, match="no step"):
        read_program({"error": "no step"})


@pytest.mark.parametrize(
    ("label", "category"),
    [
        ("params['w1']", Category.PARAMETER),
        ("state.params['Dense_0']['kernel']", Category.PARAMETER),
        ("state.opt_state[0].mu['w']", Category.OPTIMIZER_STATE),
        ("batch['image']", Category.INPUT),
    ],
)
def test_purposes_follow_names(label: str, category: Category) -> None:
    assert category_of(label) is category


# --- the card ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "limit_mib"), [(143156, 107368), (100001, 75002), (80000, 60000), (40961, 30722)])
def test_the_limit_is_a_fraction_in_whole_pages(mib: int, limit_mib: int) -> None:
    """``bytes_limit`` as recorded for cards of these sizes."""
    assert limit_on(JaxOptions(), custom_device(mib * MIB)) == limit_mib * MIB


def test_preallocation_takes_the_limit_and_says_what_would_do() -> None:
    trace = trace_of(read_program(steps.followed("gpt")), "gpt")
    setting = Setting(device_named("A100-40GB"), (2, 13))
    as_default = RUNTIME.run(trace, read_options("", {}), setting)
    grown = RUNTIME.run(trace, read_options("XLA_PYTHON_CLIENT_PREALLOCATE=false", {}), setting)
    assert as_default.main.peak_reserved_bytes == limit_on(JaxOptions(), setting.device)
    assert grown.main.peak_reserved_bytes == 2 * GIB
    assert as_default.details["reserved_with_memory_growth_bytes"] == 2 * GIB
    assert "XLA_CLIENT_MEM_FRACTION=0.03" in as_default.diagnostics[0].message


def test_a_program_beyond_the_fraction_does_not_fit_though_the_card_is_larger() -> None:
    trace = trace_of(read_program(steps.followed("gpt")), "gpt")
    for device, words in (
        (custom_device(3 * GIB // 2), "no fraction gives as much beside the CUDA context"),
        (custom_device(7 * GIB // 5, "T4"), "XLA_CLIENT_MEM_FRACTION=0.8 gives as much"),
    ):
        found = RUNTIME.run(trace, JaxOptions(), Setting(device, (2, 13)))
        assert found.limited is not None
        assert found.limited.out_of_memory is not None
        assert words in found.diagnostics[0].message


@pytest.mark.parametrize(
    ("text", "environment", "options"),
    [
        ("", {}, JaxOptions()),
        ("", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, JaxOptions(preallocate=False)),
        ("XLA_PYTHON_CLIENT_PREALLOCATE=0", {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, JaxOptions(preallocate=False)),
        ("XLA_CLIENT_MEM_FRACTION=.9", {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, JaxOptions(memory_fraction=0.9)),
        ("XLA_PYTHON_CLIENT_ALLOCATOR=platform", {}, JaxOptions(False, 1.0)),
        ("XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async", {}, JaxOptions(allocator="pool")),
    ],
)
def test_variables_are_read_as_jax_reads_them(text: str, environment: dict[str, str], options: JaxOptions) -> None:
    assert read_options(text, environment) == options


@pytest.mark.parametrize(
    "text",
    ["allow_growth=true", "XLA_CLIENT_MEM_FRACTION=2", "XLA_CLIENT_MEM_FRACTION=x", "XLA_PYTHON_CLIENT_ALLOCATOR=new",
     "XLA_CLIENT_MEM_FRACTION=.5,XLA_PYTHON_CLIENT_MEM_FRACTION=.5",
     "XLA_CLIENT_MEM_FRACTION=.5,XLA_CLIENT_MEM_FRACTION=.6"],
)  # fmt: skip
def test_other_options_are_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(UsageError, match=r"accepted|JAX refuses|given twice"):
        read_options(text, {})


def test_every_card_that_cuda_13_runs_on_is_described() -> None:
    for card in all_devices():
        if card.compute_capability is not None and card.limits.cuda_13:
            text = target_config(card)
            assert f"core_count: {card.sm_count}" in text
            assert text.count("{") == text.count("}")
    with pytest.raises(UsageError, match=r"compute capability 7\.5 and later, not on V100-16GB"):
        target_config(device_named("V100-16GB"))


# --- what a user points at --------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("jax") is not None, reason="JAX is installed")
def test_without_jax_the_extra_is_named() -> None:
    with pytest.raises(SourceError, match=r"jax:step\.py:step needs JAX; .* pip install 'graphmem\[jax\]'"):
        load("jax:step.py:step")


@pytest.fixture
def compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are those of the goldens, whatever the card."""
    monkeypatch.setattr(jax_function, "_require_jax", lambda model: None)
    monkeypatch.setattr(jax_function, "_in_own_process", lambda asked: steps.followed(asked["text"].rpartition(":")[2]))


@pytest.mark.usefixtures("compiled_before")
def test_an_answer_is_the_recorded_one() -> None:
    estimate = analyze("jax:steps.py:gpt", device="H200", alloc_conf="XLA_PYTHON_CLIENT_PREALLOCATE=false")
    last = steps.recorded()["gpt"]["rows"][-1]
    assert (estimate.allocated, estimate.reserved) == (last["peak_bytes_in_use"], last["pool_bytes"])
    assert estimate.runtime == "jax"
    assert "donate_argnums" not in estimate.report()  # it donates
    said = " ".join(estimate.assumptions)
    assert "compiled by XLA of JAX 0.10.2 for H200-141GB" in said
    assert "jit_step: XLA's own memory_analysis() says arguments" in said
    assert "its temporary block is fullest" in said


@pytest.mark.usefixtures("compiled_before")
@pytest.mark.parametrize(
    ("name", "open_ended"),
    [("gpt", set()), ("cnn", {"cuDNN's workspaces"}), ("spectral", {"cuFFT's work areas"}),
     ("gaussian_process", {"cuSOLVER's workspaces"}), ("sorting", {"XLA's sorts"})],
)  # fmt: skip
def test_what_only_a_card_knows_is_told(name: str, open_ended: set[str]) -> None:
    causes = {cause.name: cause for cause in analyze(f"jax:steps.py:{name}", device="A100-80GB").doubts.causes}
    assert {one for one, cause in causes.items() if cause.spread("allocated").above} == open_ended
    assert causes["kernels that XLA tries out"].spread("allocated").most == TRIED_BYTES[-1]


@pytest.mark.usefixtures("compiled_before")
def test_options_of_a_step_are_refused_for_a_program_that_says_what_its_step_is() -> None:
    with pytest.raises(UsageError, match="says itself what its step is"):
        analyze("jax:steps.py:gpt", training=Training(optimizer="sgd"))
    with pytest.raises(UsageError, match="runs under --runtime jax alone"):
        analyze("jax:steps.py:gpt", runtime="tensorflow")


def _analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "graphmem", "analyze", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


_STEP = """
import jax
import jax.numpy as jnp

@jax.jit
def step(params, x):
    return jax.tree.map(lambda w: w - x.mean(), params)

def shapes(batch=8):
    return [jax.ShapeDtypeStruct((256, 256), jnp.float32)], jax.ShapeDtypeStruct((batch, 256), jnp.float32)

def build(batch=8):
    return step, shapes(batch)

def plain(x):
    return x

def broken(batch=8):
    return jax.jit(lambda a, b: a @ b), (jnp.zeros((2, 3)), jnp.zeros((2, 3)))

alone = jax.ShapeDtypeStruct((4,), jnp.float32)
"""
_HAS_JAX = find_spec("jax") is not None and find_spec("jax_plugins") is not None
needs_jax = pytest.mark.skipif(not _HAS_JAX, reason="JAX and its compiler for CUDA are not installed")


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("step.py:step",), "nothing says what it is called with"),
        (("step.py:plain", "--shapes", "shapes"), "plain is not jitted"),
        (("step.py:plain", "--batch", "2"), "plain has no parameter 'batch'"),
        (("step.py:step", "--shapes", "alone"), "alone gives a ShapeDtypeStruct; it should be a tuple"),
        (("step.py:broken",), "dot_general requires contracting dimensions to have the same shape"),
        (("step.py:build", "--optimizer", "sgd"), "says itself what its step is"),
        (("step.py:build", "--runtime", "pytorch"), "runs under --runtime jax alone"),
        (("step.py:build", "--gpu", "V100"), "compute capability 7.5 and later"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "step.py").write_text(_STEP)
    done = _analyze(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@needs_jax
@pytest.mark.slow
def test_a_step_is_the_same_from_a_file_and_from_python(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    (tmp_path / "step.py").write_text(_STEP)
    done = _analyze(tmp_path, "step.py:step", "--shapes", "shapes", "-b", "16", "--gpu", "A100", "--format", "json")
    by_file = json.loads(done.stdout)
    step = jax.jit(lambda params, x: jax.tree.map(lambda w: w - x.mean(), params))
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    estimate = analyze(step, [jax.ShapeDtypeStruct((256, 256), jnp.float32)], x, device="A100")
    assert estimate.requested == by_file["peak"]["requested_bytes"]


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "eager_around"])
def test_a_program_is_followed_as_its_golden_was(name: str, tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("flax")
    asked = {"text": f"{steps.STEPS}:{name}", "shapes": None, "batch": None, "seq_len": None, "iterations": steps.CALLS,
             "cards": 1, "target": target_config(device_named(steps.CARD))}  # fmt: skip
    request, result = tmp_path / "request.json", tmp_path / "step.json"
    request.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "graphmem.sources.jax_program", str(request), str(result)]
    subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL, check=True)
    assert json.loads(result.read_text()) == steps.followed(name)
