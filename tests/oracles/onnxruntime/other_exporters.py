"""Models that other programs than PyTorch export: tf2onnx, skl2onnx, onnxmltools.

    python -m tests.oracles.onnxruntime.other_exporters FOLDER [NAME ...]

Needs the exporter of each (TensorFlow for tf2onnx); what is missing is said, the others are written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Made = Callable[[Path], None]
MODELS: dict[str, Made] = {}


# --- tf2onnx ----------------------------------------------------------------------------------------------------------


def _keras(name: str, shape: tuple[int | None, ...], layers: Callable[[Any], list[Any]]) -> None:
    def write(path: Path) -> None:
        import keras
        import tensorflow as tf
        import tf2onnx

        net = keras.Sequential([keras.Input(shape, name="x"), *layers(keras.layers)])
        call = tf.function(lambda x: net(x), input_signature=[tf.TensorSpec((None, *shape), tf.float32, name="x")])
        tf2onnx.convert.from_function(call, input_signature=call.input_signature, opset=17, output_path=str(path))

    MODELS[f"tf_{name}"] = write


_keras(
    "dense", (64,), lambda k: [k.Dense(128, "relu"), k.LayerNormalization(), k.Dense(32, "silu"), k.Dense(5, "softmax")]
)
_keras("images", (32, 32, 3), lambda k: [
    k.Conv2D(16, 3, padding="same"), k.BatchNormalization(), k.ReLU(), k.MaxPooling2D(), k.SeparableConv2D(32, 3),
    k.ReLU(6.0), k.Conv2D(32, 3, 2, "same"), k.GlobalAveragePooling2D(), k.Dense(10),
])  # fmt: skip
_keras("upsampled", (16, 16, 8), lambda k: [
    k.Conv2DTranspose(16, 3, 2, "same"), k.UpSampling2D(), k.DepthwiseConv2D(3, padding="same"), k.AveragePooling2D(2),
    k.Conv2D(4, 1, activation="sigmoid"),
])  # fmt: skip
_keras("lstm", (20, 24), lambda k: [k.Bidirectional(k.LSTM(32, return_sequences=True)), k.LSTM(16), k.Dense(3)])
_keras("lines", (128, 8), lambda k: [
    k.Conv1D(32, 5, padding="causal", activation="relu"), k.MaxPooling1D(), k.Conv1D(64, 3, dilation_rate=2),
    k.Flatten(), k.Dense(6),
])  # fmt: skip


# --- scikit-learn and the trees ---------------------------------------------------------------------------------------


def _fitted(name: str, make: Callable[[], Any], classes: int = 3) -> None:
    def write(path: Path) -> None:
        import skl2onnx
        from skl2onnx.common.data_types import FloatTensorType

        data, labels = _samples(classes)
        model = make().fit(data, labels)
        made = skl2onnx.to_onnx(model, initial_types=[("x", FloatTensorType([None, 20]))], options=_options(model))
        path.write_bytes(made.SerializeToString())

    MODELS[f"skl_{name}"] = write


def _options(model: Any) -> Any:
    return (
        {id(model): {"zipmap": False}}
        if model.__class__.__name__ != "GaussianMixture" and hasattr(model, "predict_proba")
        else None
    )


def _samples(classes: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((300, 20)).astype(np.float32), generator.integers(0, classes, 300)


def _scikit(module: str, name: str, **arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        import importlib

        return getattr(importlib.import_module(f"sklearn.{module}"), name)(**arguments)

    return make


def _pipeline() -> Any:
    from sklearn.decomposition import PCA
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), PCA(8), MLPClassifier((32, 16), max_iter=20))


_fitted("forest", _scikit("ensemble", "RandomForestClassifier", n_estimators=20))
_fitted("boosted", _scikit("ensemble", "GradientBoostingRegressor", n_estimators=20))
_fitted("logistic", _scikit("linear_model", "LogisticRegression"))
_fitted("ridge", _scikit("linear_model", "Ridge"))
_fitted("vectors", _scikit("svm", "SVC", probability=True))
_fitted("means", _scikit("cluster", "KMeans", n_clusters=4, n_init=1))
_fitted("neighbors", _scikit("neighbors", "KNeighborsClassifier"))
_fitted("gaussian", _scikit("gaussian_process", "GaussianProcessRegressor"))
_fitted("mixture", _scikit("mixture", "GaussianMixture", n_components=3))
_fitted("pipeline", _pipeline)


def _trees(name: str, library: str, kind: str) -> None:
    def write(path: Path) -> None:
        import importlib

        import onnxmltools
        from onnxconverter_common.data_types import FloatTensorType

        data, labels = _samples(3)
        model = getattr(importlib.import_module(library), kind)(n_estimators=10).fit(data, labels)
        convert = getattr(onnxmltools, f"convert_{library}")
        made = convert(model, initial_types=[("x", FloatTensorType([None, 20]))], target_opset=15)
        path.write_bytes(made.SerializeToString())

    MODELS[name] = write


_trees("mltools_lightgbm", "lightgbm", "LGBMRegressor")
_trees("mltools_xgboost", "xgboost", "XGBRegressor")


def main(folder: str, *names: str) -> None:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name, write in MODELS.items():
        target = place / f"{name}.onnx"
        if (names and not any(name.startswith(start) for start in names)) or target.exists():
            continue
        try:
            write(target)
        except Exception as error:  # whatever an exporter raises: the others are still wanted
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)
        else:
            print(name, target.stat().st_size, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
