"""Flytekit in tests: settings for serialization, and its event loop, which runs until the process ends."""

import gc
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# A filter of warnings for test modules: the garbage collector removes the folders of flytekit's checkpoints.
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
    """Return the part of the serialized task template that the cluster's plug-in reads."""
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict

    spec: Any = get_serializable({}, settings(), task)
    found: dict[str, Any] = MessageToDict(spec.template.to_flyte_idl().custom)
    return found


def loop() -> Iterator[None]:
    """Import flytekit and start the thread of its event loop, which never ends. The body of a module's fixture."""
    handler = signal.getsignal(signal.SIGINT)
    from flytekit.utils.asyn import run_sync

    signal.signal(signal.SIGINT, handler)  # flytekit's handler would exit without a KeyboardInterrupt

    async def nothing() -> None:
        return None

    run_sync(nothing)
    # Load the modules that flytekit loads at their first use. Otherwise hypothesis, which looks through sys.modules,
    # would load them in another test, and joblib would set an environment variable there.
    for module in [*sys.modules.values()]:
        if type(module).__name__ == "_LazyModule":
            getattr(module, "__doc__", None)
    yield
    with warnings.catch_warnings():
        # Each context has a folder for checkpoints, which the garbage collector removes with a warning.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
