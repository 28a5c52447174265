"""Training with the strategy of the package lightning-Horovod; each rank prints the sum of its weights."""

import os
import sys

import pytorch_lightning
from lightning_horovod.strategy import HorovodStrategy
from pytorch_lightning.demos.boring_classes import BoringModel

pytorch_lightning.seed_everything(int(os.environ["HOROVOD_RANK"]))  # the strategy broadcasts rank 0's weights
model = BoringModel()
trainer = pytorch_lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=HorovodStrategy(),
    max_epochs=1,
    limit_train_batches=8,
    limit_val_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    gradient_clip_val=1.0,
)
trainer.fit(model)
total = sum(each.double().sum().item() for each in model.parameters())
sys.stdout.write(f"weights: {total} of {trainer.world_size}\n")
