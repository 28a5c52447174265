"""Training step that calls the user's `train_minibatch_fn`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.trainers.run import Run
from farandole.estimators.trainers.torch.judge import Judge, TrainMinibatch
from farandole.estimators.trainers.torch.tensors import outputs_of


class MinibatchStep:
    """Calls the function once per step on every rank; a rank without rows passes two rows that weigh nothing.

    The function reduces gradients by `optimizer.step()`. It may call that several times, but equally often on every
    rank."""

    def __init__(self, function: TrainMinibatch, judge: Judge, run: Run) -> None:
        self._function, self._judge, self._label_cols = function, judge, judge.label_cols
        self._stand_in = run.stand_in()

    def __call__(
        self, model: torch.nn.Module, optimizer: object, batch: ShardBatch
    ) -> tuple[float, list[float]] | None:
        """Train on a batch; return its mean loss and its scores, None without rows.

        Raises `ConfigError` if the function does not return (outputs, loss)."""
        # A batch of a data module contains stand-in rows already.
        judge, shown = self._judge, batch if all(map(len, batch.columns.values())) else self._stand_in
        made: list[Tensor] = []

        def loss_fn(outputs: object, labels: Sequence[Tensor], sample_weights: Tensor | None = None) -> Tensor:
            listed = outputs_of(outputs, self._label_cols)
            if not batch.rows:
                # Not the loss times 0, which is NaN if the loss of the stand-in rows is not finite.
                return torch.stack([(each * 0.0).sum() for each in listed]).sum()
            # The optimizer averages over ranks; with the weight the average is the mean over all rows of the step.
            made.append(judge.loss(list(zip(listed, labels, strict=True)), sample_weights) * shown.weight)
            return made[-1]

        labels = judge.labels(shown)
        given = self._function(
            model, optimizer, self._transform_outputs, loss_fn, judge.inputs(shown), labels, judge.weights(shown)
        )
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise ConfigError("train_minibatch_fn", f"must return (outputs, loss), got {type(given).__name__}")
        if not batch.rows:
            return None
        outputs, labels = self._transform_outputs(given[0], labels)
        loss = _number(given[1])
        # Compared by value, as the function may return a number or a detached tensor. Its own losses have no weight.
        weighted = any(loss == _number(each) for each in made)
        pairs = [(output.detach(), label) for output, label in zip(outputs, labels, strict=True)]
        return loss / (shown.weight if weighted else 1.0), judge.scores(pairs)

    def _transform_outputs(self, outputs: object, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs as a list, and the labels in the shapes of the outputs if they have as many numbers."""
        listed = outputs_of(outputs, self._label_cols)
        return listed, self._judge.fitted(labels, listed)


def _number(loss: object) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)  # type: ignore[arg-type]  # the user's
