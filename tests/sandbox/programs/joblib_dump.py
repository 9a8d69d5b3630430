"""joblib: a scaler and a state dict in one file; a memory cache."""
import os

import joblib
import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

memory = joblib.Memory("jobcache", verbose=0)


@memory.cache
def features(n):
    return np.ones((n, 16), dtype=np.float32)


scaler = StandardScaler().fit(features(24))
model = nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.from_numpy(features(24)).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
joblib.dump({"scaler": scaler, "state": {n: v.cpu() for n, v in model.state_dict().items()}}, "bundle.joblib")
print("SEE", sorted(joblib.load("bundle.joblib")), os.path.isdir("jobcache"))
