import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.optim as optim
from common import done, is_over, show

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, stride=4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1024, 1000)
)
lr = 0.01
optimizer = optim.SGD(model.parameters(), lr=lr)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum)
data, target = torch.randn(8, 3, 64, 64), torch.LongTensor(8).random_() % 1000


def benchmark_step(state):
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()
    state.batch += 1
    state.steps += 1
    show(hvd, state.steps)
    if state.batch == 2:
        state.batch = 0
        state.commit()


@hvd.elastic.run
def run_benchmark(state):
    if not state.warm:
        timeit.timeit(lambda: benchmark_step(state), number=2)
        state.warm = True
        state.commit()
    for number in range(state.iter, 10_000):
        time = timeit.timeit(lambda: benchmark_step(state), number=3)
        state.img_secs.append(8 * 3 / time)
        state.iter = number
        state.commit()
        if hvd.allreduce(torch.tensor(is_over()), name="over", op=hvd.Max).item():
            return


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = lr


state = hvd.elastic.TorchState(model, optimizer, img_secs=[], iter=0, batch=0, warm=False, steps=0)
state.register_reset_callbacks([on_state_reset])
run_benchmark(state)
assert len(state.img_secs) >= state.iter
done([each.detach().numpy() for each in model.parameters()])
