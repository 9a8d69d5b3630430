"""Keras on PyTorch: the ModelCheckpoint callback, weights and whole models, saved and loaded."""

import os
import tempfile

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

folder = tempfile.mkdtemp()
keras.utils.set_random_seed(0)
x, y = np.random.rand(64, 128).astype("float32"), np.random.randint(0, 10, 64)


def build():
    model = keras.Sequential([
        keras.layers.Input((128,)), keras.layers.Dense(512, activation="relu"), keras.layers.BatchNormalization(),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    return model


model = build()
keep = keras.callbacks.ModelCheckpoint(os.path.join(folder, "epoch_{epoch}.weights.h5"), save_weights_only=True)
model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[keep])
model.save(os.path.join(folder, "model.keras"))
again = build()
again.load_weights(os.path.join(folder, "epoch_3.weights.h5"))
again.fit(x, y, batch_size=16, epochs=1, verbose=0)
whole = keras.models.load_model(os.path.join(folder, "model.keras"))
whole.predict(x, verbose=0)
torch.save(whole.state_dict(), os.path.join(folder, "state.pt"))
whole.load_state_dict(torch.load(os.path.join(folder, "state.pt")))
print(sorted(os.listdir(folder)), torch.cuda.max_memory_allocated())
