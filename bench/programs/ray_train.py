"""Train a small network with the TorchTrainer of Ray Train."""

import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from timing import Steps

WIDTH, BATCH = 1024, 16


def train():
    """Train as one of the workers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps = Steps()
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = prepare_model(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)))
    rows = torch.rand(2 * BATCH * steps.total, WIDTH)
    dataset = torch.utils.data.TensorDataset(rows, rows.mean(1, keepdim=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, sums in prepare_data_loader(torch.utils.data.DataLoader(dataset, batch_size=BATCH)):
        loss = torch.nn.functional.mse_loss(model(inputs), sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.done(loss.item())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        two = ScalingConfig(num_workers=2)
        TorchTrainer(train, scaling_config=two, run_config=RunConfig(storage_path=folder)).fit()
    ray.shutdown()
