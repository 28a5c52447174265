"""Flytekit in tests: its settings for serialization, and its event loop, which lives as long as the process."""

import gc
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["IGNORED_FOLDERS", "custom_of", "loop", "settings"]

# A mark for modules of tests: flytekit leaves the folders of its checkpoints to the garbage collector.
IGNORED_FOLDERS = "ignore:Implicitly cleaning up:ResourceWarning"


def settings() -> Any:
    """Return settings for serialization with an image and the entrypoint of a usual installation."""
    from flytekit.configuration import Image, ImageConfig, SerializationSettings

    image = Image(name="image", fqn="registry/trainer", tag="1")
    return SerializationSettings(
        image_config=ImageConfig(default_image=image, images=[image]),
        project="sales",
        domain="development",
        version="1",
        python_interpreter="/opt/venv/bin/python",
        env={},
    )


def custom_of(task: Any) -> dict[str, Any]:
    """Return the task's part for its plug-in on the cluster, as the serialized task template holds it."""
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict

    spec: Any = get_serializable({}, settings(), task)
    found: dict[str, Any] = MessageToDict(spec.template.to_flyte_idl().custom)
    return found


def loop() -> Iterator[None]:
    """Import flytekit and start the thread of its event loop, which never ends; the body of a module's fixture."""
    handler = signal.getsignal(signal.SIGINT)
    from flytekit.utils.asyn import run_sync

    signal.signal(signal.SIGINT, handler)  # flytekit's own would exit, without a KeyboardInterrupt

    async def nothing() -> None:
        return None

    run_sync(nothing)
    # Modules that flytekit loads at their first use: anything that looks through sys.modules, as hypothesis does, would
    # load them in the middle of another test, and joblib sets a variable.
    for module in [*sys.modules.values()]:
        if type(module).__name__ == "_LazyModule":
            getattr(module, "__doc__", None)
    yield
    with warnings.catch_warnings():
        # Each context has a folder for checkpoints, which the garbage collector removes.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
