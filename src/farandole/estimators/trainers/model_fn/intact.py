"""Choice of the TensorFlow checkpoint after which a run continues: the newest intact one in its folder."""

from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from farandole.errors import SourceError


def choose_intact(folder: Path, shown: str, warn: Callable[[str], object]) -> None:
    """Make the newest intact checkpoint the last one in the list of `folder`, the file `checkpoint`.

    TensorFlow begins anew, without an error, if that file is damaged or names files that are missing. Reads the whole
    checkpoint. Calls `warn` with a text that names newer checkpoints if there are any. Raises `SourceError` if there
    are only damaged ones. Texts name the folder as `shown`."""
    state = tf.train.get_checkpoint_state(str(folder))
    listed = [] if state is None else [Path(each).name for each in state.all_model_checkpoint_paths]
    last = [] if state is None else [Path(state.model_checkpoint_path).name]
    found = [each.stem for each in folder.glob("model.ckpt-*.index")]
    names = dict.fromkeys([*last, *sorted({*listed, *found}, key=_step, reverse=True)])
    problems = ["its file 'checkpoint' is damaged or missing"] if state is None else []
    if not names and not (folder / "checkpoint").exists():
        return
    for name in names:
        if (problem := _problem(folder / name)) is None:
            if problems:
                kept = [each for each in sorted(found, key=_step) if _step(each) < _step(name)]
                tf.compat.v1.train.update_checkpoint_state(str(folder), name, [*kept, name])
                warn(f"{shown}: {'; '.join(problems)}: the run continues after {name}")
            return
        problems.append(f"{name} is damaged ({problem})")
    remedy = "there is no intact checkpoint: remove the folder to start the run again, or set another one"
    raise SourceError(shown, f"{'; '.join(problems)}; {remedy}")


def _step(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _problem(path: Path) -> str | None:
    try:
        reader = tf.train.load_checkpoint(str(path))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)  # compares its checksum
    except (tf.errors.OpError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
