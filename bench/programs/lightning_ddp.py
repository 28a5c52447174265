"""Train a perceptron with Lightning's DDP."""

import lightning
import torch
from timing import Steps

STEPS = Steps()
WIDTH, BATCH = 1024, 16


class Perceptron(lightning.LightningModule):
    """Three layers that learn the sum of their inputs."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, 1),
        )  # fmt: skip

    def training_step(self, batch, number):
        rows, sums = batch
        return torch.nn.functional.mse_loss(self.layers(rows), sums)

    def on_train_batch_end(self, outputs, batch, number):
        STEPS.done(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


lightning.seed_everything(0)
rows = torch.rand(2 * BATCH * STEPS.total, WIDTH)
dataset = torch.utils.data.TensorDataset(rows, rows.mean(1, keepdim=True))
lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS.total, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Perceptron(), torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True))  # fmt: skip
