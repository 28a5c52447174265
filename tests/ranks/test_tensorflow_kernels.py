"""The kernels that TensorFlow has of the operations, for devices that this machine need not have."""

import pytest

tf = pytest.importorskip("tensorflow")

from tensorflow.python.framework import kernels  # noqa: E402  # after the module that it needs is known to be there

from farandole.tensorflow.plugin import operations  # noqa: E402

ARGUMENTS = {
    "FarandoleAllreduce": {"tensors", "results"},
    "FarandoleAllgather": {"tensors", "results"},
    "FarandoleBroadcast": {"tensors", "results"},
    "FarandoleReducescatter": {"tensors", "results"},
    "FarandoleAlltoall": {"tensor", "splits", "received", "received_splits"},
    "FarandoleBarrier": set(),
    "FarandoleJoin": {"last"},
    "FarandolePlace": {"number"},
}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_an_operation_may_be_placed_on_a_gpu_and_works_in_host_memory(op: str) -> None:
    operations()
    registered = kernels.get_registered_kernels_for_op(op).kernel
    in_host_memory = {each.device_type: set(each.host_memory_arg) for each in registered}
    assert in_host_memory == {"CPU": ARGUMENTS[op], "GPU": ARGUMENTS[op]}
