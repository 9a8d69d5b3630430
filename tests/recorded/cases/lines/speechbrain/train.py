"""A recipe of SpeechBrain: features, a recurrent encoder, a classifier of speakers."""

import sys

import speechbrain as sb
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.RNN import GRU


class Speakers(sb.Brain):
    def compute_forward(self, batch, stage):
        waves = batch[0].to(self.device)
        encoded, _ = self.modules.encoder(self.modules.features(waves))
        return self.modules.classifier(encoded.mean(dim=1))

    def compute_objectives(self, said, batch, stage):
        return torch.nn.functional.cross_entropy(said, batch[1].to(self.device))


if __name__ == "__main__":
    _, options, _ = sb.parse_arguments(["none.yaml", *sys.argv[1:]])
    modules = {
        "features": Fbank(n_mels=80),
        "encoder": GRU(hidden_size=512, input_shape=[None, None, 80], num_layers=2, bidirectional=True),
        "classifier": Linear(n_neurons=50, input_size=1024),
    }
    data = torch.utils.data.TensorDataset(torch.randn(32, 16000), torch.randint(50, (32,)))
    brain = Speakers(modules, lambda parameters: torch.optim.Adam(parameters, lr=1e-3), run_opts=options)
    brain.fit(range(1), torch.utils.data.DataLoader(data, batch_size=8))
