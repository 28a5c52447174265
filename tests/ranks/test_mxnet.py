"""The parts of MXNet's binding that no other binding has: Gluon, modules, both kinds of arrays, Horovod's arguments."""

import importlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from farandole.compat import install, uninstall
from farandole.core.context import Context
from farandole.errors import InvalidRequest, MismatchError
from helpers.installed import require
from helpers.ranks import run_ranks

require("mxnet")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of names that MXNet uses and NumPy has deprecated
    hvd = importlib.import_module("farandole.mxnet")
mx = importlib.import_module("mxnet")  # after farandole, which prepares NumPy for it

Array = npt.NDArray[Any]

# The kind of arrays that Gluon takes. MXNet 2 keeps it as a setting of the thread.
array = mx.nd.array if mx.__version__ < "2" else mx.np.array
in_thread = mx.util.use_np if mx.__version__ >= "2" else (lambda body: body)

SIZE = 2
ROWS = np.random.default_rng(1).standard_normal((8, 3)).astype("float32")
ANSWERS = ROWS @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25
ADAM = ("adam", {"learning_rate": 0.1})


def make_net(start: float = 0.1, units: int = 3) -> Any:
    """Return a model whose weights are `start`; without `units` the first batch decides their shape."""
    net = mx.gluon.nn.Dense(1, in_units=units)
    net.initialize(mx.init.Constant(start))
    return net


def take_steps(net: Any, trainer: Any, rows: Array = ROWS, answers: Array = ANSWERS) -> list[Array]:
    """Take five steps, and return the parameters."""
    for _ in range(5):
        with mx.autograd.record():
            loss = mx.gluon.loss.L2Loss()(net(array(rows)), array(answers))
        loss.backward()
        trainer.step(len(rows))
    return [each.data().asnumpy() for each in net.collect_params().values()]


LOSSY = [{"compression": each} for each in (hvd.Compression.fp16, hvd.Compression.int8)]


@pytest.mark.parametrize("options", [{}, {"num_groups": 1}, {"gradient_predivide_factor": 2.0}, *LOSSY])
def test_a_trainer_trains_like_one_process(options: dict[str, Any]) -> None:
    net = make_net()
    expected = take_steps(net, mx.gluon.Trainer(net.collect_params(), *ADAM))

    @in_thread
    def body(context: Context) -> None:
        net, mine = make_net(), slice(context.rank, None, SIZE)
        trainer = hvd.DistributedTrainer(net.collect_params(), *ADAM, prefix="a.", **options)
        for got, want in zip(take_steps(net, trainer, ROWS[mine], ANSWERS[mine]), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0.02 if options in LOSSY else 1e-4)

    run_ranks(SIZE, body)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_parameter_without_a_gradient_on_one_rank(at_once: bool) -> None:
    @in_thread
    def body(context: Context) -> None:
        first, second = make_net(0.0), make_net(0.0)
        params = [each.weight for each in (first, second)]
        trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0})
        for step in range(3):
            with mx.autograd.record():
                loss = (first if step < 2 and context.rank == 0 else second)(array(np.ones((1, 3))))
            loss.backward()
            if at_once:
                trainer.step(1, ignore_stale_grad=True)
            else:
                trainer.allreduce_grads()
                trainer.update(1, ignore_stale_grad=True)
        assert [each.data().asnumpy().tolist() for each in params] == [[[-1.0] * 3], [[-2.0] * 3]]
        with mx.autograd.record():
            loss = first(array(np.ones((1, 3))))
        loss.backward()
        with pytest.raises(UserWarning, match="stale"):
            trainer.step(1)

    run_ranks(SIZE, body)


def test_gradients_are_sums_between_allreduce_and_update() -> None:
    @in_thread
    def body(context: Context) -> None:
        net = make_net()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
        with mx.autograd.record():
            net(array(np.full((1, 3), context.rank + 1.0))).backward()
        trainer.allreduce_grads()
        np.testing.assert_array_equal(net.weight.grad().asnumpy(), [[3.0, 3.0, 3.0]])
        trainer.update(1)
        np.testing.assert_allclose(net.weight.data().asnumpy(), [[-1.4] * 3], rtol=1e-6)

    run_ranks(SIZE, body)


def test_a_trainer_of_a_process_set() -> None:
    net = make_net()
    expected = take_steps(net, mx.gluon.Trainer(net.collect_params(), *ADAM))

    @in_thread
    def body(context: Context) -> None:
        own = hvd.add_process_set([1])
        if context.rank == 1:
            net = make_net()
            got = take_steps(net, hvd.DistributedTrainer(net.collect_params(), *ADAM, process_set=own))
            np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)

    run_ranks(SIZE, body)


def test_what_a_trainer_refuses_and_unwraps() -> None:
    def body(context: Context) -> None:
        with pytest.raises(ValueError, match="must be > 0"):
            hvd.DistributedTrainer(make_net().collect_params(), "sgd", gradient_predivide_factor=0)
        with pytest.raises(ValueError, match="num_groups must be >= 0, got -1"):
            hvd.DistributedTrainer(make_net().collect_params(), "sgd", num_groups=-1)
        words = mx.gluon.Parameter("words", shape=(5, 2), grad_stype="row_sparse", init=mx.init.Constant(0.1))
        words.initialize()
        with pytest.raises(ValueError, match="words: gradients must be dense"):
            hvd.DistributedTrainer([words], "sgd")
        with pytest.raises(InvalidRequest, match="compression is 'fp16', which is no compressor"):
            hvd.DistributedTrainer(make_net().collect_params(), "sgd", compression="fp16")
        wide = mx.gluon.nn.Dense(1, in_units=3)
        wide.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        with pytest.raises(ValueError, match="one context"):
            hvd.DistributedTrainer(wide.collect_params(), "sgd").allreduce_grads()
        wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(rescale_grad=0.5))
        with pytest.warns(UserWarning, match="unwrapped"):
            trainer = hvd.DistributedTrainer(make_net().collect_params(), wrapped)
        assert type(trainer.optimizer) is mx.optimizer.SGD and trainer.optimizer.rescale_grad == 0.5

    run_ranks(1, body)


@pytest.mark.skipif(not hasattr(mx, "module"), reason="MXNet 2 has no modules")
@pytest.mark.parametrize("more", [{}, {"num_groups": 1}, {"gradient_predivide_factor": 4.0}], ids=str)
def test_a_module_trains_like_one_process(more: dict[str, Any]) -> None:
    def broadcast(params: Any) -> Any:
        hvd.broadcast_parameters(params[0], root_rank=0)
        return params

    def train(optimizer: Any, rows: Array, answers: Array) -> dict[str, Array]:
        data = mx.io.NDArrayIter(rows, answers, batch_size=len(rows))
        output = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")
        module = mx.mod.Module(mx.sym.LinearRegressionOutput(output, name="softmax"))
        module.bind(data.provide_data, data.provide_label)
        module.init_params(mx.init.Constant(0.1 * (1 + hvd.rank())))
        module.set_params(*broadcast(module.get_params()))
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        for _ in range(5):
            module.forward_backward(mx.io.DataBatch([mx.nd.array(rows)], [mx.nd.array(answers)]))
            module.update()
        return {name: value.asnumpy() for name, value in module.get_params()[0].items()}

    def body(context: Context) -> None:
        mine = slice(context.rank, None, context.size)
        rows = len(ROWS) // context.size
        optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / rows)
        wrapped = hvd.DistributedOptimizer(optimizer, **more)
        trained[context.size].append(train(wrapped, ROWS[mine], ANSWERS[mine]))
        wrapped.lr_scheduler = mx.lr_scheduler.FactorScheduler(5)
        wrapped.set_lr_mult({"fc_bias": 2.0})
        assert optimizer.lr_scheduler is wrapped.lr_scheduler and optimizer.lr_mult == {"fc_bias": 2.0}

    trained: dict[int, list[dict[str, Array]]] = {1: [], SIZE: []}
    for size in trained:
        run_ranks(size, body)
    for one in trained[SIZE]:
        for name, want in trained[1][0].items():
            np.testing.assert_allclose(one[name], want, rtol=1e-4)


def test_a_saved_optimizer_is_loaded() -> None:
    def body(context: Context) -> None:
        updater = mx.optimizer.get_updater(
            hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.01, momentum=0.9), num_groups=3)
        )
        weight = mx.nd.zeros(4)
        updater(0, mx.nd.ones(4) * context.rank, weight)
        again = mx.optimizer.get_updater(mx.optimizer.SGD())
        again.set_states(updater.get_states(dump_optimizer=True))
        assert isinstance(again.optimizer, hvd.DistributedOptimizer) and again.optimizer.momentum == 0.9
        again(0, mx.nd.ones(4), weight)
        np.testing.assert_allclose(weight.asnumpy(), -0.01 * 0.5 - 0.01 * (1 + 0.45), rtol=1e-5)

    run_ranks(SIZE, body)


def test_parameters_begin_as_those_of_the_root() -> None:
    def body(context: Context) -> None:
        net = make_net(start=context.rank + 1.0)
        hvd.broadcast_parameters(net.collect_params(), root_rank=1)
        np.testing.assert_array_equal(net.weight.data().asnumpy(), 2.0)
        arrays = {"b": mx.nd.ones(2) * context.rank, "a": mx.nd.array([context.rank], dtype="int32")}
        hvd.broadcast_parameters(arrays, root_rank=0, prefix="state.")
        assert [arrays[name].asnumpy().tolist() for name in "ab"] == [[0], [0.0, 0.0]]
        hvd.broadcast_parameters({})
        with pytest.raises(ValueError, match="invalid params of type: list"):
            hvd.broadcast_parameters([mx.nd.ones(1)])

    run_ranks(SIZE, body)


def test_parameters_of_unknown_shape_are_broadcast_by_the_first_batch() -> None:
    @in_thread
    def body(context: Context) -> None:
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Dense(4), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dense(2))
        net.initialize(mx.init.Constant(context.rank + 1.0))
        for _ in range(2):  # a program may repeat it
            hvd.broadcast_parameters({str(i): each for i, each in enumerate(net.collect_params().values())})
        with mx.autograd.record():
            net(array(ROWS)).backward()
        for layer in (net[0], net[2]):
            np.testing.assert_array_equal(layer.weight.data().asnumpy(), 1.0)
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
        trainer.step(len(ROWS))
        assert np.isfinite(net[2].weight.data().asnumpy()).all()

    run_ranks(SIZE, body)


def test_both_kinds_of_arrays() -> None:
    def body(context: Context) -> None:
        for make, kind in ((mx.nd.array, mx.nd.NDArray), (mx.np.array, mx.np.ndarray)):
            mine = make([[1.0, 2.0], [3.0, 4.0]]) * (context.rank + 1)
            sent = make([1, 1], dtype="int32")
            rows, received = hvd.alltoall(mine, splits=sent)
            results = [hvd.allreduce(mine, op=hvd.Sum), hvd.allgather(mine), hvd.broadcast(mine, 1), rows, received]
            results += [hvd.reducescatter(mine, hvd.Sum), hvd.Compression.fp16.compress(mine)[0]]
            assert {type(each) for each in results} == {kind}
            np.testing.assert_array_equal(results[0].asnumpy(), [[3, 6], [9, 12]])
            assert received.asnumpy().tolist() == [1, 1] and received.dtype == np.int32

    run_ranks(SIZE, body)


@pytest.mark.parametrize("change", [hvd.allreduce_, lambda array, op: hvd.grouped_allreduce_([array], op=op)[0]])
def test_work_of_mxnets_before_and_after(change: Any) -> None:
    def body(context: Context) -> None:
        whole = mx.nd.ones((600, 600)) * 2 + 1
        product = mx.nd.dot(whole, whole)  # reads what is overwritten next
        after = change(whole, op=hvd.Sum) + 1
        assert (product == 5400).asnumpy().all() and (after == 7).asnumpy().all()

    run_ranks(SIZE, body)


def test_arguments_are_those_of_horovod() -> None:
    def body(context: Context) -> None:
        one = mx.nd.ones(4)
        assert (
            hvd.allreduce(one, None, "a", -3, 0.5, 3.0, hvd.global_process_set, hvd.Sum).asnumpy().tolist() == [3.0] * 4
        )
        assert hvd.grouped_allreduce([one], None, "b", 1, 2.0)[0].asnumpy().tolist() == [2.0] * 4
        assert hvd.broadcast_(one * 5, 0, "c", 7).asnumpy().tolist() == [5.0] * 4
        assert hvd.reducescatter(one, hvd.Sum, "d", 2, hvd.global_process_set, 0.5).asnumpy().tolist() == [1.0] * 2
        assert hvd.grouped_reducescatter([one], name="e", priority=1)[0].shape == (2,)
        assert hvd.grouped_allgather([one], "f", 1)[0].shape == (8,)
        assert hvd.broadcast_object({"rank": context.rank}, 1) == {"rank": 1}
        assert hvd.allgather_object(context.rank) == [0, 1]
        assert pickle.loads(pickle.dumps(one)).shape == (4,)

    run_ranks(SIZE, body)


def test_arrays_in_layouts_of_onednn() -> None:
    def body(context: Context) -> None:
        layer = mx.gluon.nn.Conv2D(16, 3, in_channels=16)
        layer.initialize(mx.init.Constant(0.01))
        images = array(np.random.default_rng(2).random((2, 16, 8, 8), "float32"))
        made = layer(images)
        expected = layer(images).asnumpy()
        np.testing.assert_allclose(hvd.broadcast(made, context.rank).asnumpy(), expected, rtol=1e-6)
        np.testing.assert_allclose(hvd.allreduce_(layer(images)).asnumpy(), expected, rtol=1e-6)

    run_ranks(1, body)


def test_refused_arrays() -> None:
    def body(context: Context) -> None:
        with pytest.raises(TypeError, match="expected an MXNet array, got ndarray"):
            hvd.allreduce(np.ones(1))
        with pytest.raises(InvalidRequest, match="row_sparse"):
            hvd.allreduce(mx.nd.ones((2, 2)).tostype("row_sparse"))
        with pytest.raises(InvalidRequest, match="splits must be a list of integers"):
            hvd.alltoall(mx.nd.ones(2), splits=mx.nd.array([0.5, 0.5]))
        with pytest.raises(MismatchError, match="shape"):
            hvd.allreduce(mx.nd.ones(2 + context.rank), name="shape")

    run_ranks(SIZE, body)


@pytest.fixture
def answered() -> Iterator[None]:
    install()
    yield
    uninstall()


def test_horovods_modules(answered: None) -> None:
    theirs = importlib.import_module("horovod.mxnet")
    assert theirs.DistributedTrainer is hvd.DistributedTrainer and theirs.mpi_ops.allreduce_ is hvd.allreduce_
    assert theirs.functions.broadcast_object is hvd.broadcast_object
    whole = mx.nd.ones(2)
    for one in (theirs.compression.FP16Compressor, theirs.compression.NoneCompressor):
        small, ctx = one.compress(whole)
        assert one.decompress(small, ctx).dtype == np.float32
        assert (small.dtype == np.float16) == (one is theirs.compression.FP16Compressor)
