"""Compiled Keras models, whose training steps in TensorFlow are recorded.

Each is ``keras:models_zoo/keras_models.py:NAME`` to graphmem.

Keras runs them under TensorFlow where they are recorded and under its PyTorch backend where they are predicted, so
nothing here may know a backend.
"""

from __future__ import annotations

from typing import Any


def mlp_sgd() -> Any:
    """Two hidden layers of 1024, SGD with momentum."""
    return compiled("mlp", "sgd")


def mlp_adam() -> Any:
    """Two hidden layers of 1024, Adam."""
    return compiled("mlp", "adam")


def cnn_sgd() -> Any:
    """Two convolutions and two dense layers, SGD with momentum."""
    return compiled("cnn", "sgd")


def cnn_adam() -> Any:
    """Two convolutions and two dense layers, Adam."""
    return compiled("cnn", "adam")


def resnet50_adam() -> Any:
    """Keras's ResNet-50, Adam."""
    return compiled("resnet50", "adam")


def compiled(name: str, optimizer: str) -> Any:
    """The model, compiled without XLA for classes given as integers."""
    import keras

    model = _BUILDERS[name]()
    adam = optimizer == "adam"
    chosen = keras.optimizers.Adam(1e-3) if adam else keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer=chosen, loss="sparse_categorical_crossentropy", jit_compile=False)
    return model


def _mlp() -> Any:
    import keras
    from keras import layers

    hidden = [layers.Dense(1024, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10, activation="softmax")])


def _cnn() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _resnet50() -> Any:
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3))


_BUILDERS = {"mlp": _mlp, "cnn": _cnn, "resnet50": _resnet50}
