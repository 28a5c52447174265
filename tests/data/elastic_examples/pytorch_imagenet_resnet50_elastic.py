import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data
from common import digits, done, is_over, show

BATCH, PER_ALLREDUCE, PER_COMMIT, WARMUP, BASE_LR = 8, 2, 3, 5, 0.0125


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def accuracy(output, target):
    return output.max(1, keepdim=True)[1].eq(target.view(-1, 1)).cpu().float().mean()


def adjust_learning_rate(epoch, batch):
    epoch += float(batch + 1) / max(1, len(train_loader))
    factor = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / WARMUP + 1) if epoch < WARMUP else 1.0
    for group in optimizer.param_groups:
        group["lr"] = BASE_LR * hvd.size() * PER_ALLREDUCE * factor


def train(state):
    model.train()
    loss_metric, accuracy_metric = Metric("train_loss"), Metric("train_accuracy")
    offset = state.batch
    for index, (data, target) in enumerate(train_loader):
        state.batch = offset + index
        adjust_learning_rate(state.epoch, state.batch)
        optimizer.zero_grad()
        for start in range(0, len(data), BATCH):
            part, wanted = data[start : start + BATCH], target[start : start + BATCH]
            output = model(part)
            accuracy_metric.update(accuracy(output, wanted))
            loss = F.cross_entropy(output, wanted)
            loss_metric.update(loss)
            loss.div_(math.ceil(len(data) / BATCH))
            loss.backward()
        state.train_sampler.record_batch(index, BATCH * PER_ALLREDUCE)
        optimizer.step()
        state.steps += 1
        show(hvd, state.steps)
        if (state.batch + 1) % PER_COMMIT == 0:
            state.commit()
    state.commit()


def validate(epoch):
    model.eval()
    loss_metric, accuracy_metric = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            output = model(data)
            loss_metric.update(F.cross_entropy(output, target))
            accuracy_metric.update(accuracy(output, target))
    return loss_metric.avg.item()


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FORMAT.format(epoch=epoch + 1))


def end_epoch(state):
    state.epoch += 1
    state.batch = 0
    state.train_sampler.set_epoch(state.epoch)
    state.commit()


@hvd.elastic.run
def full_train(state):
    while state.epoch < 10_000:
        train(state)
        validate(state.epoch)
        save_checkpoint(state.epoch)
        end_epoch(state)
        if hvd.allreduce(torch.tensor(is_over()), name="over", op=hvd.Max).item():
            return


FORMAT = "checkpoint-{epoch}.pth.tar"
hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
images, labels = (torch.from_numpy(each) for each in digits(384))
dataset = torch.utils.data.TensorDataset(images[:, None] / 255, labels.long())
train_sampler = hvd.elastic.ElasticSampler(dataset)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH * PER_ALLREDUCE, sampler=train_sampler)
val_dataset = torch.utils.data.Subset(dataset, range(48))
val_sampler = hvd.elastic.ElasticSampler(val_dataset)
val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=BATCH, sampler=val_sampler)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3, stride=2),
    torch.nn.BatchNorm2d(4),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(676, 10),
)
optimizer = optim.SGD(model.parameters(), lr=BASE_LR * PER_ALLREDUCE * hvd.size(), momentum=0.9, weight_decay=0.00005)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PER_ALLREDUCE,
    op=hvd.Average,
    gradient_predivide_factor=2.0,
)
resume = max([epoch for epoch in range(1, 200) if os.path.exists(FORMAT.format(epoch=epoch))], default=0)
if resume > 0 and hvd.rank() == 0:
    checkpoint = torch.load(FORMAT.format(epoch=resume))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
state = hvd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    train_sampler=train_sampler,
    val_sampler=val_sampler,
    epoch=resume,
    batch=0,
    steps=0,
)
full_train(state)
done([each.detach().numpy() for each in model.parameters()])
