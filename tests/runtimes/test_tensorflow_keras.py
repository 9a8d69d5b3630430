"""Keras models on Keras's PyTorch backend as a source: their shapes, their variables, their training step.

Needs Keras 3, which is optional.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from graphmem import Training, analyze
from graphmem.errors import SourceError, UsageError
from graphmem.estimate import Estimate
from graphmem.trace import Category

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")


@pytest.fixture(autouse=True)
def on_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where TensorFlow is installed, whose own steps are tested in test_tensorflow_steps.py."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")


MODELS = """
import keras
from keras import layers


def network():
    return keras.Sequential([
        keras.Input((32, 32, 3)), layers.Conv2D(32, 3, padding="same", activation="relu"), layers.BatchNormalization(),
        layers.MaxPooling2D(), layers.Conv2D(64, 3, padding="same", activation="relu"), layers.Flatten(),
        layers.Dense(128, activation="relu"), layers.Dense(10, activation="softmax"),
    ])


def compiled():
    model = network()
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy")
    return model


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(16)

    def call(self, x):
        return self.dense(x)


def own():
    return Own()


def own_with_data(batch=4):
    import numpy

    model = Own()
    model.compile("sgd", "mse")
    return model, numpy.zeros((batch, 8), "float32"), numpy.zeros((batch, 16), "float32")


def tokens():
    return keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(100, 8), layers.Dense(2)])


def number():
    return 3
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keras") / "models.py"
    path.write_text(MODELS)
    return f"keras:{path}"


def categories(estimate: Estimate) -> dict[str, int]:
    assert estimate.trace is not None
    totals: dict[str, int] = {}
    for storage in estimate.trace.storages:
        totals[storage.category.name] = totals.get(storage.category.name, 0) + storage.bytes
    return totals


def test_a_compiled_model_trains_with_its_own_optimizer(models: str) -> None:
    estimate = analyze(f"{models}:compiled", batch=32, training=True)
    assert (estimate.runtime, estimate.step.split()[0]) == ("tensorflow", "train_step")
    totals = categories(estimate)
    # as recorded in tf_train.json.gz for the same model in TensorFlow: variables of 8,472,360 bytes
    # (256 of them not trained), Adam's 16,944,220: its counter has 8 bytes there, and 4 with Keras on PyTorch
    assert totals["PARAMETER"] == 8_472_104
    assert totals["BUFFER"] == 256
    assert totals["OPTIMIZER_STATE"] == 16_944_216
    assert [phase.name for phase in estimate.phases if phase.iteration == 3] == ["forward", "backward", "optimizer"]
    assumed = " ".join(estimate.assumptions)
    assert "Keras's PyTorch backend" in assumed
    assert "jit_compile='auto'" in assumed
    assert "replayed under TensorFlow's allocator" in assumed


def test_iterations_and_batch_reach_the_training_step(models: str) -> None:
    estimate = analyze(f"{models}:own_with_data", batch=6, training=True, iterations=1)
    assert estimate.trace is not None
    assert max(phase.iteration for phase in estimate.phases) == 1
    inputs = [s.bytes for s in estimate.trace.storages if s.category == Category.INPUT]
    assert 6 * 8 * 4 in inputs


def test_inference_and_the_default_loop_take_the_declared_shape(models: str) -> None:
    estimate = analyze(f"{models}:network", batch=8, training=False)
    totals = categories(estimate)
    assert totals["INPUT"] == 8 * 32 * 32 * 3 * 4
    assert totals["PARAMETER"] == 8_472_104
    labels = {storage.label for storage in estimate.trace.storages} if estimate.trace else set()
    assert sum(label.endswith("/kernel") for label in labels) == 4
    assert not any("torch_params" in label for label in labels)
    trained = analyze(f"{models}:network", batch=8, training=Training(optimizer="sgd"), iterations=1)
    assert categories(trained)["GRADIENT"] == 8_472_104


def test_the_pytorch_runtime_replays_it_too(models: str) -> None:
    estimate = analyze(f"{models}:tokens", batch=2, seq_len=16, training=False, runtime="pytorch")
    assert estimate.runtime == "pytorch"
    assert "PyTorch" in estimate.allocator
    assert categories(estimate)["INPUT"] == 2 * 16 * 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokens", r"has the shape \(None, None\); give --seq-len"),
        ("own", r"without keras\.Input; return \(model, x\)"),
        ("number", r"number returned a int; it should return a keras\.Model"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_cannot_be_analysed_says_why(models: str, name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        analyze(f"{models}:{name}", training=False)


def test_a_precision_is_keras_own_business(models: str) -> None:
    with pytest.raises(UsageError, match="set_dtype_policy"):
        analyze(f"{models}:network", training=Training(dtype="bf16"))
    with pytest.raises(UsageError, match="export it to ONNX"):
        analyze(f"{models}:network", runtime="onnxruntime")


def test_keras_leaves_no_trace_in_the_environment(models: str) -> None:
    before = dict(os.environ)
    analyze(f"{models}:tokens", seq_len=4, training=False)
    assert dict(os.environ) == before
    import keras

    assert keras.random.normal((2,)).shape == (2,)  # draws with a generator again
