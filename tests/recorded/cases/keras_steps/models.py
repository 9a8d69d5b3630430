"""Compiled Keras models with a batch, of any backend: ``keras:models.py:NAME`` to graphmem, ``NAME()`` to the recorder.

Each function returns ``(model, x, y)``; its name is the case's.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops


def _compiled(
    inputs: Any, outputs: Any, x: Any, y: Any, *, loss: str = "sparse_categorical_crossentropy",
    optimizer: Any = None, jit: bool | str = False, eager: bool = False,
) -> Any:  # fmt: skip
    model = keras.Model(inputs, outputs)
    model.compile(optimizer or keras.optimizers.Adam(1e-3), loss, jit_compile=jit, run_eagerly=eager)
    return model, x, y


def _floats(*shape: int) -> Any:
    return np.zeros(shape, "float32")


def _integers(*shape: int) -> Any:
    return np.zeros(shape, "int32")


# --- dense ------------------------------------------------------------------------------------------------------------


def mlp(**options: Any) -> Any:
    i = keras.Input((784,))
    h = layers.Dense(2048, activation="relu")(i)
    h = layers.Dense(2048, activation="relu")(h)
    return _compiled(
        i, layers.Dense(10, activation="softmax", dtype="float32")(h), _floats(256, 784), _integers(256), **options
    )


def mlp_eager() -> Any:
    return mlp(eager=True)


def mlp_sgd() -> Any:
    return mlp(optimizer=keras.optimizers.SGD(0.01, momentum=0.9))


def mlp_bfloat16() -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return mlp()


def mlp_xla() -> Any:
    return mlp(jit=True)


def mlp_wide(**options: Any) -> Any:
    """Dropout and gelu, AdamW, gradients clipped by their global norm."""
    i = keras.Input((256,))
    h = i
    for _ in range(4):
        h = layers.Dropout(0.1)(layers.Dense(1024, activation="gelu")(h))
    optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    return _compiled(i, layers.Dense(100)(h), _floats(4096, 256), _floats(4096, 100), loss="mse", optimizer=optimizer,
                     **options)  # fmt: skip


def autoencoder(**options: Any) -> Any:
    i = keras.Input((1024,))
    h = i
    for width in (512, 128, 32, 128, 512):
        h = layers.Dense(width, activation="tanh")(h)
    out = layers.Dense(1024, activation="sigmoid")(h)
    x = _floats(2048, 1024)
    options.setdefault("optimizer", keras.optimizers.RMSprop(1e-3))
    return _compiled(i, out, x, x, loss="binary_crossentropy", **options)


def autoencoder_xla() -> Any:
    return autoencoder(jit=True)


def two_towers() -> Any:
    """Two inputs, concatenated; a named pair of outputs' sum."""
    a, b = keras.Input((512,)), keras.Input((512,))
    h = layers.Concatenate()([layers.Dense(512, activation="relu")(a), layers.Dense(512, activation="elu")(b)])
    h = layers.BatchNormalization()(layers.Dense(1024, activation="relu")(h))
    x = [_floats(1024, 512), _floats(1024, 512)]
    return _compiled([a, b], layers.Dense(1)(h), x, _floats(1024, 1), loss="mse")


# --- convolutions -----------------------------------------------------------------------------------------------------


def cnn(**options: Any) -> Any:
    i = keras.Input((64, 64, 3))
    h = layers.Conv2D(64, 3, padding="same", activation="relu")(i)
    h = layers.MaxPooling2D()(h)
    h = layers.Conv2D(128, 3, padding="same", activation="relu")(h)
    h = layers.MaxPooling2D()(h)
    h = layers.Dense(256, activation="relu")(layers.Flatten()(h))
    out = layers.Dense(10, activation="softmax", dtype="float32")(h)
    return _compiled(i, out, _floats(32, 64, 64, 3), _integers(32), **options)


def cnn_bfloat16() -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return cnn()


def cnn_xla() -> Any:
    return cnn(jit=True)


def resnet(**options: Any) -> Any:
    i = keras.Input((64, 64, 3))
    h = layers.Conv2D(64, 3, padding="same", use_bias=False)(i)
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        s = layers.Conv2D(width, 1, strides=stride, use_bias=False)(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.Conv2D(width, 3, padding="same", use_bias=False)(h)
        h = layers.Add()([h, s])
    h = layers.GlobalAveragePooling2D()(h)
    out = layers.Dense(10, activation="softmax")(h)
    return _compiled(i, out, _floats(32, 64, 64, 3), _integers(32), **options)


def resnet_sgd() -> Any:
    return resnet(optimizer=keras.optimizers.SGD(0.01))


def resnet50() -> Any:
    model = keras.applications.ResNet50(weights=None, classes=1000, input_shape=(224, 224, 3))
    return _compiled(model.inputs, model.outputs, _floats(8, 224, 224, 3), _integers(8))


def mobilenet() -> Any:
    model = keras.applications.MobileNetV2(weights=None, classes=100, input_shape=(96, 96, 3))
    return _compiled(model.inputs, model.outputs, _floats(32, 96, 96, 3), _integers(32))


def unet(**options: Any) -> Any:
    i = keras.Input((128, 128, 1))
    a = layers.Conv2D(32, 3, padding="same", activation="relu")(i)
    b = layers.Conv2D(64, 3, padding="same", activation="relu")(layers.MaxPooling2D()(a))
    c = layers.Conv2D(128, 3, padding="same", activation="relu")(layers.MaxPooling2D()(b))
    d = layers.Concatenate()([layers.Conv2DTranspose(64, 2, strides=2)(c), b])
    d = layers.Conv2D(64, 3, padding="same", activation="relu")(d)
    e = layers.Concatenate()([layers.UpSampling2D()(layers.Conv2D(32, 1)(d)), a])
    out = layers.Conv2D(1, 1, activation="sigmoid")(e)
    return _compiled(i, out, _floats(8, 128, 128, 1), _floats(8, 128, 128, 1), loss="binary_crossentropy", **options)


def unet_xla() -> Any:
    return unet(jit=True)


def resnet_xla() -> Any:
    return resnet(jit=True)


def conv1d() -> Any:
    i = keras.Input((1024, 16))
    h = layers.Conv1D(128, 5, strides=2, activation="relu")(i)
    h = layers.Conv1D(128, 5, activation="relu")(layers.BatchNormalization()(h))
    h = layers.AveragePooling1D(2)(h)
    h = layers.GlobalMaxPooling1D()(h)
    return _compiled(i, layers.Dense(5)(h), _floats(64, 1024, 16), _floats(64, 5), loss="mse")


# --- recurrent --------------------------------------------------------------------------------------------------------


def lstm(**options: Any) -> Any:
    i = keras.Input((64,), dtype="int32")
    h = layers.Embedding(10000, 256)(i)
    h = layers.LSTM(512, return_sequences=True)(h)
    h = layers.LSTM(512)(h)
    return _compiled(i, layers.Dense(10, activation="softmax")(h), _integers(64, 64), _integers(64), **options)


def lstm_xla() -> Any:
    """XLA has no cuDNN recurrence: Keras turns it off by itself under "auto", and fails where it is asked for."""
    return lstm(jit="auto")


def bidirectional() -> Any:
    i = keras.Input((100, 32))
    h = layers.Bidirectional(layers.LSTM(128, return_sequences=True))(i)
    h = layers.Bidirectional(layers.LSTM(64))(h)
    return _compiled(i, layers.Dense(1)(h), _floats(128, 100, 32), _floats(128, 1), loss="mse")


def simple_rnn() -> Any:
    """A while loop: cuDNN has no place in it."""
    i = keras.Input((50, 64))
    h = layers.SimpleRNN(256, return_sequences=True)(i)
    return _compiled(i, layers.Dense(8)(h), _floats(64, 50, 64), _floats(64, 50, 8), loss="mse")


def lstm_tagger(**options: Any) -> Any:
    """A label a step, from two layers over floats; RMSprop."""
    i = keras.Input((96, 64))
    h = layers.LSTM(256, return_sequences=True)(i)
    h = layers.Dropout(0.2)(layers.LSTM(256, return_sequences=True)(h))
    out = layers.Dense(12, activation="softmax")(h)
    options.setdefault("optimizer", keras.optimizers.RMSprop(1e-3))
    return _compiled(i, out, _floats(64, 96, 64), _integers(64, 96), **options)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    width: int = 512, depth: int = 4, vocabulary: int = 10000, tokens: int = 128, batch: int = 16, **options: Any
) -> Any:
    i = keras.Input((tokens,), dtype="int32")
    h = layers.Embedding(vocabulary, width)(i)
    for _ in range(depth):
        a = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.MultiHeadAttention(8, width // 8)(a, a)])
        a = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(a))])
    out = layers.Dense(vocabulary, activation="softmax", dtype="float32")(layers.LayerNormalization()(h))
    return _compiled(i, out, _integers(batch, tokens), _integers(batch, tokens), **options)


def attention_xla() -> Any:
    return attention(jit=True)


def attention_bfloat16() -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return attention()


def decoder() -> Any:
    """Causal, with grouped queries, rotary angles left out; AdamW."""
    i = keras.Input((256,), dtype="int32")
    h = layers.Embedding(8000, 384)(i)
    for _ in range(3):
        a = layers.LayerNormalization(rms_scaling=True)(h)
        h = layers.Add()([h, layers.GroupQueryAttention(48, 8, 2)(a, a, use_causal_mask=True)])
        a = layers.LayerNormalization(rms_scaling=True)(h)
        gate, up = layers.Dense(1024, activation="silu")(a), layers.Dense(1024)(a)
        h = layers.Add()([h, layers.Dense(384)(layers.Multiply()([gate, up]))])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-4)
    return _compiled(i, layers.Dense(8000)(h), _integers(8, 256), _integers(8, 256), loss=loss, optimizer=optimizer)


def vit(**options: Any) -> Any:
    i = keras.Input((96, 96, 3))
    h = layers.Conv2D(256, 8, strides=8)(i)
    h = layers.Reshape((144, 256))(h)
    for _ in range(4):
        a = layers.LayerNormalization()(h)
        h = h + layers.MultiHeadAttention(4, 64, dropout=0.1)(a, a)
        h = h + layers.Dense(256)(layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(h)))
    out = layers.Dense(100, activation="softmax")(ops.mean(h, axis=1))
    return _compiled(i, out, _floats(32, 96, 96, 3), _integers(32), **options)


def vit_xla() -> Any:
    return vit(jit=True)


def mlp_wide_xla() -> Any:
    return mlp_wide(jit=True)


def mlp_bfloat16_xla() -> Any:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return mlp(jit=True)


# --- recorded before anything was predicted, second time --------------------------------------------------------------


def unet_deep() -> Any:
    """Batch normalization, dropout, transposed convolutions, three levels."""
    i = keras.Input((96, 96, 3))
    h, skips = i, []
    for width in (24, 48, 96):
        for _ in range(2):
            h = layers.Conv2D(width, 3, padding="same", use_bias=False)(h)
            h = layers.ReLU()(layers.BatchNormalization()(h))
        skips.append(h)
        h = layers.Dropout(0.1)(layers.MaxPooling2D()(h))
    h = layers.Conv2D(192, 3, padding="same", activation="relu")(h)
    for width in (96, 48, 24):
        h = layers.Conv2DTranspose(width, 3, strides=2, padding="same")(h)
        h = layers.Concatenate()([h, skips.pop()])
        h = layers.Conv2D(width, 3, padding="same", activation="relu")(h)
    out = layers.Conv2D(5, 1, activation="softmax")(h)
    return _compiled(i, out, _floats(12, 96, 96, 3), _integers(12, 96, 96))


def gru() -> Any:
    i = keras.Input((80,), dtype="int32")
    h = layers.Embedding(6000, 192)(i)
    h = layers.GRU(320, return_sequences=True)(h)
    h = layers.GRU(160)(h)
    return _compiled(i, layers.Dense(4)(h), _integers(96, 80), _floats(96, 4), loss="mse")


def depthwise() -> Any:
    """Separable and depthwise convolutions of several strides; SGD with momentum."""
    i = keras.Input((112, 112, 3))
    h = layers.Conv2D(24, 3, strides=2, padding="same", use_bias=False)(i)
    for width, stride in ((48, 1), (96, 2), (96, 1), (192, 2), (192, 1)):
        h = layers.DepthwiseConv2D(3, strides=stride, padding="same", use_bias=False)(h)
        h = layers.ReLU(6.0)(layers.BatchNormalization()(h))
        h = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(width, 1, use_bias=False)(h)))
    h = layers.GlobalAveragePooling2D()(layers.SeparableConv2D(256, 3, padding="same", activation="relu")(h))
    out = layers.Dense(50, activation="softmax")(h)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    return _compiled(i, out, _floats(24, 112, 112, 3), _integers(24), optimizer=optimizer)


def encoder_float16() -> Any:
    """A transformer's encoder in mixed float16, its loss scaled."""
    keras.config.set_dtype_policy("mixed_float16")
    i = keras.Input((192,), dtype="int32")
    h = layers.Embedding(5000, 256)(i)
    for _ in range(3):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(4, 64, dropout=0.1)(h, h))
        h = layers.LayerNormalization()(h + layers.Dense(256)(layers.Dense(1024, activation="relu")(h)))
    out = layers.Dense(20, activation="softmax", dtype="float32")(layers.GlobalAveragePooling1D()(h))
    return _compiled(i, out, _integers(24, 192), _integers(24))


class _Gan(keras.Model):  # type: ignore[misc]
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([
            keras.Input((64,)), layers.Dense(7 * 7 * 128), layers.Reshape((7, 7, 128)),
            layers.Conv2DTranspose(96, 4, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ])  # fmt: skip
        self.discriminator = keras.Sequential([
            keras.Input((28, 28, 1)), layers.Conv2D(64, 4, strides=2, padding="same"), layers.LeakyReLU(),
            layers.Conv2D(128, 4, strides=2, padding="same"), layers.LeakyReLU(), layers.Flatten(), layers.Dense(1),
        ])  # fmt: skip

    def call(self, x: Any) -> Any:
        return self.discriminator(x)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        real = data[0] if isinstance(data, tuple) else data
        noise = tf.random.normal((128, 64))
        with tf.GradientTape() as tape:
            fake = self.generator(noise)
            said = self.discriminator(tf.concat([fake, real], 0))
            loss = self.loss_of(tf.concat([tf.ones((128, 1)), tf.zeros((128, 1))], 0), said)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            loss_g = self.loss_of(tf.zeros((128, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(loss_g, weights), weights, strict=True))
        return {"d": loss, "g": loss_g}


def gan() -> Any:
    model = _Gan()
    model.compile(keras.optimizers.Adam(2e-4), keras.optimizers.Adam(1e-4))
    return model, _floats(128, 28, 28, 1), _floats(128, 1)


def classifier() -> Any:
    """Words embedded, one LSTM, a small head; Adam with weight decay."""
    i = keras.Input((150,), dtype="int32")
    h = layers.LSTM(192)(layers.Embedding(20000, 128)(i))
    h = layers.Dense(64, activation="relu")(layers.Dropout(0.3)(h))
    out = layers.Dense(1, activation="sigmoid")(h)
    optimizer = keras.optimizers.Adam(1e-3, weight_decay=1e-4)
    return _compiled(i, out, _integers(128, 150), _floats(128, 1), loss="binary_crossentropy", optimizer=optimizer)


def autoencoder_norm() -> Any:
    """Convolutions down and up again, batch normalization after each."""
    i = keras.Input((64, 64, 3))
    h = i
    for width in (32, 64, 128):
        h = layers.BatchNormalization()(layers.Conv2D(width, 3, strides=2, padding="same", activation="elu")(h))
    h = layers.Dense(64, activation="tanh")(layers.Flatten()(h))
    h = layers.Reshape((8, 8, 128))(layers.Dense(8 * 8 * 128)(h))
    for width in (64, 32, 16):
        h = layers.BatchNormalization()(layers.Conv2DTranspose(width, 3, strides=2, padding="same")(h))
    out = layers.Conv2D(3, 3, padding="same", activation="sigmoid")(h)
    x = _floats(48, 64, 64, 3)
    return _compiled(i, out, x, x, loss="mae", optimizer=keras.optimizers.AdamW(1e-3))


def fitted() -> Any:
    """Batches of ``tf.data``, by ``fit``."""
    i = keras.Input((48, 48, 3))
    h = layers.Conv2D(32, 5, strides=2, activation="relu")(i)
    h = layers.Conv2D(64, 3, activation="relu")(h)
    h = layers.GroupNormalization(8)(layers.AveragePooling2D(2)(h))
    h = layers.Dense(512, activation="silu")(layers.Flatten()(h))
    out = layers.Dense(20, activation="softmax")(layers.Dropout(0.5)(h))
    return _compiled(i, out, _floats(64, 48, 48, 3), _integers(64), optimizer=keras.optimizers.Nadam(1e-3))


# --- predicted before anything was recorded ---------------------------------------------------------------------------


def mixer() -> Any:
    """Patches mixed over places and over channels by dense layers; Lion."""
    i = keras.Input((64, 64, 3))
    h = layers.Reshape((64, 192))(layers.Conv2D(192, 8, strides=8)(i))
    for _ in range(4):
        a = layers.Permute((2, 1))(layers.LayerNormalization()(h))
        a = layers.Dense(64)(layers.Dense(256, activation="gelu")(a))
        h = layers.Add()([h, layers.Permute((2, 1))(a)])
        a = layers.Dense(192)(layers.Dense(768, activation="gelu")(layers.LayerNormalization()(h)))
        h = layers.Add()([h, layers.Dropout(0.1)(a)])
    out = layers.Dense(40, activation="softmax")(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h)))
    return _compiled(i, out, _floats(96, 64, 64, 3), _integers(96), optimizer=keras.optimizers.Lion(1e-4))


def text_cnn() -> Any:
    """Words under filters of three widths; Adam (merging sparse gradients, as RMSprop does, needs a card's values)."""
    i = keras.Input((200,), dtype="int32")
    h = layers.SpatialDropout1D(0.2)(layers.Embedding(12000, 160)(i))
    found = [layers.GlobalMaxPooling1D()(layers.Conv1D(128, width, activation="relu")(h)) for width in (3, 4, 5)]
    h = layers.Dense(256, activation="relu")(layers.Dropout(0.4)(layers.Concatenate()(found)))
    out = layers.Dense(6, activation="softmax")(h)
    return _compiled(i, out, _integers(64, 200), _integers(64), optimizer=keras.optimizers.Adam(5e-4))


def gru_tagger() -> Any:
    """Words in both directions, a label each; AdamW."""
    i = keras.Input((60,), dtype="int32")
    h = layers.Dropout(0.2)(layers.Embedding(9000, 144)(i))
    h = layers.Bidirectional(layers.GRU(176, return_sequences=True))(h)
    h = layers.LayerNormalization()(layers.Bidirectional(layers.GRU(112, return_sequences=True))(h))
    out = layers.Dense(24, activation="softmax")(layers.Dropout(0.3)(h))
    return _compiled(i, out, _integers(72, 60), _integers(72, 60), optimizer=keras.optimizers.AdamW(2e-3))


def inception() -> Any:
    """Branches of several filters, a filter of one place first in each; SGD with momentum."""
    i = keras.Input((80, 80, 3))
    h = layers.MaxPooling2D(2)(layers.Conv2D(48, 5, strides=2, padding="same", activation="relu")(i))
    for width in (32, 64, 96):
        narrow = layers.Conv2D(width, 1, activation="relu")(h)
        branches = [
            narrow,
            layers.Conv2D(width, 3, padding="same", activation="relu")(narrow),
            layers.Conv2D(width // 2, 5, padding="same", activation="relu")(layers.Conv2D(width // 2, 1)(h)),
            layers.Conv2D(width // 2, 1, activation="relu")(layers.AveragePooling2D(3, strides=1, padding="same")(h)),
        ]
        h = layers.MaxPooling2D(2)(layers.BatchNormalization()(layers.Concatenate()(branches)))
    out = layers.Dense(30, activation="softmax")(layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(h)))
    return _compiled(i, out, _floats(40, 80, 80, 3), _integers(40), optimizer=keras.optimizers.SGD(0.02, momentum=0.9))


def recommender() -> Any:
    """Embeddings of several inputs, crossed, and a deep tower; gradients are clipped by their norm."""
    named = [(keras.Input((1,), dtype="int32"), rows) for rows in (30000, 18000, 500, 90)]
    h = [layers.Flatten()(layers.Embedding(rows, 48)(i)) for i, rows in named]
    crossed = layers.Multiply()([h[0], h[1]])
    deep = layers.Concatenate()(h)
    for width in (512, 256, 128):
        deep = layers.Dropout(0.1)(layers.BatchNormalization()(layers.Dense(width, activation="silu")(deep)))
    out = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([crossed, deep]))
    optimizer = keras.optimizers.Adam(1e-3, clipnorm=1.0)
    x = [_integers(2048, 1) for _ in named]
    return _compiled([i for i, _ in named], out, x, _floats(2048, 1), loss="binary_crossentropy", optimizer=optimizer)
