import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
from common import digits, done, is_over, show

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
images, labels = (torch.from_numpy(each) for each in digits(2048))
dataset = torch.utils.data.TensorDataset(images[:, None] / 255, labels.long())
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=5)
        self.drop = nn.Dropout2d()
        self.fc = nn.Linear(4 * 12 * 12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.drop(self.conv(x)), 2))
        return F.log_softmax(self.fc(x.view(len(x), -1)), dim=1)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Average
)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 10_000):  # noqa: B020  as in Horovod's example
        state.model.train()
        sampler.set_epoch(state.epoch)
        remaining = len(loader) - state.batch
        for state.batch, (data, target) in enumerate(loader):
            if state.batch >= remaining:
                break
            state.optimizer.zero_grad()
            F.nll_loss(state.model(data), target).backward()
            state.optimizer.step()
            state.steps += 1
            show(hvd, state.steps)
            state.commit()
            if hvd.allreduce(torch.tensor(is_over()), name="over", op=hvd.Max).item():
                return
        state.batch = 0


def test():
    model.eval()
    with torch.no_grad():
        output = model(images[:64, None] / 255)
    metric_average(F.nll_loss(output, labels[:64].long()).item(), "avg_loss")
    metric_average(output.argmax(1).eq(labels[:64].long()).float().mean().item(), "avg_accuracy")


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0, steps=0)
state.register_reset_callbacks([on_state_reset])
train(state)
test()
assert optimizer.param_groups[0]["lr"] == 0.01 * hvd.size()
done([each.numpy() for each in model.state_dict().values()])
