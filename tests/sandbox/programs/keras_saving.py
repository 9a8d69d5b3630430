"""Keras on PyTorch: fit with a checkpoint callback, a whole model and its weights."""
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(
    np.zeros((24, 16), "float32"), np.zeros((24, 1), "float32"), batch_size=8, epochs=1, verbose=0,
    callbacks=[keras.callbacks.ModelCheckpoint("best.keras")],
)
model.save_weights("m.weights.h5")
print("SEE", os.path.getsize("best.keras") > 0, os.path.getsize("m.weights.h5") > 0)
again = keras.models.load_model("best.keras")
print("SEE", again.count_params())
