"""DeepAR by GluonTS: lagged LSTM over series of different lengths, a Student's t head, sample paths forecast."""

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.evaluation import Evaluator, make_evaluation_predictions
from gluonts.torch import DeepAREstimator

np.random.seed(1)
series = [
    {
        "start": pd.Period("2024-01-01", freq="h"),
        "target": 20 + 5 * np.sin(np.arange(n) / 24 * 2 * np.pi) + np.random.randn(n),
        "feat_static_cat": [i % 5],
    }
    for i, n in enumerate(np.random.randint(400, 900, 40))
]
train = ListDataset([{**s, "target": s["target"][:-24]} for s in series], freq="h")
test = ListDataset(series, freq="h")
estimator = DeepAREstimator(
    freq="h",
    prediction_length=24,
    context_length=96,
    num_layers=2,
    hidden_size=64,
    num_feat_static_cat=1,
    cardinality=[5],
    batch_size=64,
    num_batches_per_epoch=8,
    num_parallel_samples=100,
    lr=1e-3,
    trainer_kwargs={
        "max_epochs": 2,
        "accelerator": "gpu",
        "devices": 1,
        "gradient_clip_val": 10.0,
        "enable_progress_bar": False,
        "logger": False,
    },
)
predictor = estimator.train(train)
forecasts, truth = make_evaluation_predictions(test, predictor=predictor, num_samples=100)
metrics, _ = Evaluator(quantiles=[0.1, 0.5, 0.9], num_workers=0)(list(truth), list(forecasts))
print({key: round(metrics[key], 3) for key in ("MASE", "RMSE")})
