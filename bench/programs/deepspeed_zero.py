"""Train a perceptron with DeepSpeed's ZeRO of stage 2, on CPUs."""

import deepspeed
import torch
from timing import Steps

STEPS = Steps()
WIDTH, BATCH = 1024, 16

torch.manual_seed(0)
layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
rows = torch.rand(2 * BATCH * STEPS.total, WIDTH)
dataset = torch.utils.data.TensorDataset(rows, rows.mean(1, keepdim=True))
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=dataset, config=config
)
for inputs, sums in loader:
    loss = torch.nn.functional.mse_loss(engine(inputs), sums)
    engine.backward(loss)
    engine.step()
    STEPS.done(loss.item())
torch.distributed.destroy_process_group()
