"""Pictures by PyTorch-Ignite: an engine with mixed precision and accumulation, handlers for rates, stops and checkpoints."""

import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, EMAHandler, PiecewiseLinear, TerminateOnNan
from ignite.metrics import Accuracy, ConfusionMatrix, Loss, RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import shufflenet_v2_x1_0

torch.manual_seed(0)
CLASSES = 20
train = DataLoader(
    TensorDataset(torch.rand(192, 3, 128, 128), torch.randint(0, CLASSES, (192,))), batch_size=24, shuffle=True
)
valid = DataLoader(TensorDataset(torch.rand(64, 3, 128, 128), torch.randint(0, CLASSES, (64,))), batch_size=32)
model = shufflenet_v2_x1_0(num_classes=CLASSES).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
criterion = nn.CrossEntropyLoss().to("cuda")
trainer = create_supervised_trainer(
    model,
    optimizer,
    criterion,
    device="cuda",
    non_blocking=True,
    amp_mode="amp",
    scaler=True,
    gradient_accumulation_steps=2,
)
metrics = {"accuracy": Accuracy(), "loss": Loss(criterion), "confusion": ConfusionMatrix(CLASSES)}
evaluator = create_supervised_evaluator(model, metrics=metrics, device="cuda", amp_mode="amp")
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
ProgressBar().attach(trainer, ["loss"])
EMAHandler(model, momentum=0.01).attach(trainer, event=Events.ITERATION_COMPLETED(every=2))
trainer.add_event_handler(
    Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", milestones_values=[(0, 0.0), (6, 0.1), (16, 0.0)])
)
trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
evaluator.add_event_handler(
    Events.COMPLETED, EarlyStopping(patience=3, score_function=lambda e: -e.state.metrics["loss"], trainer=trainer)
)
keep = Checkpoint(
    {"model": model, "optimizer": optimizer, "trainer": trainer},
    DiskSaver("checkpoints", create_dir=True, require_empty=False),
    n_saved=1,
    score_name="accuracy",
    score_function=Checkpoint.get_default_score_fn("accuracy"),
    global_step_transform=lambda *_: trainer.state.epoch,
)
evaluator.add_event_handler(Events.COMPLETED, keep)


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    state = evaluator.run(valid)
    print(f"epoch {engine.state.epoch} accuracy {state.metrics['accuracy']:.2%} loss {state.metrics['loss']:.3f}")


trainer.run(train, max_epochs=2)
