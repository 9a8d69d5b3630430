"""A table by TabNet: pretrained without labels, then fitted with early stopping, saved and loaded."""

import numpy as np
import torch
from pytorch_tabnet.pretraining import TabNetPretrainer
from pytorch_tabnet.tab_model import TabNetClassifier

rng = np.random.default_rng(0)
numbers = rng.normal(size=(6000, 20)).astype(np.float32)
kinds = rng.integers(0, [5, 12, 40], size=(6000, 3))
X = np.concatenate([numbers, kinds], 1)
y = (numbers[:, 0] + 0.5 * numbers[:, 1] * numbers[:, 2] + (kinds[:, 0] == 2) > 0.3).astype(int)
X_train, X_valid, X_test, y_train, y_valid, y_test = X[:4096], X[4096:5000], X[5000:], y[:4096], y[4096:5000], y[5000:]
settings = {
    "cat_idxs": [20, 21, 22],
    "cat_dims": [5, 12, 40],
    "cat_emb_dim": [2, 4, 8],
    "n_d": 32,
    "n_a": 32,
    "n_steps": 4,
    "optimizer_fn": torch.optim.Adam,
    "optimizer_params": {"lr": 2e-2},
    "device_name": "cuda",
}

pretrainer = TabNetPretrainer(**settings)
pretrainer.fit(X_train, eval_set=[X_valid], max_epochs=2, batch_size=512, virtual_batch_size=128, pretraining_ratio=0.5)
classifier = TabNetClassifier(
    **settings, scheduler_fn=torch.optim.lr_scheduler.StepLR, scheduler_params={"step_size": 2, "gamma": 0.9}
)
classifier.fit(
    X_train,
    y_train,
    eval_set=[(X_train, y_train), (X_valid, y_valid)],
    eval_name=["train", "valid"],
    eval_metric=["accuracy"],
    max_epochs=3,
    patience=2,
    batch_size=1024,
    virtual_batch_size=256,
    from_unsupervised=pretrainer,
)
print("accuracy", (classifier.predict(X_test) == y_test).mean())
importance, masks = classifier.explain(X_test[:256])
path = classifier.save_model("tabnet")
again = TabNetClassifier(device_name="cuda")
again.load_model(path)
print(again.predict_proba(X_test).shape)
