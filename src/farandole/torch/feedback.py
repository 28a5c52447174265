"""Error feedback: what int8 loses of a gradient is added to the next gradient (Seide et al., 2014)."""

import torch

from farandole import _native

BLOCK = 256  # values that share a scale; see native/base/int8_blocks.h


class ErrorFeedback:
    """The errors of this rank's gradients, by the names of their parameters."""

    key = "errors_of_int8"  # in an optimizer's state_dict

    def __init__(self) -> None:
        self.errors: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget everything, because the ranks have changed."""
        self.errors = {}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the errors."""
        return dict(self.errors)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take copies of what `state` returned."""
        self.errors = {name: error.clone() for name, error in state.items()}

    def feed(self, name: str, gradient: torch.Tensor) -> None:
        """Add the last error to a contiguous float32 gradient, in place, round it to int8, and keep the new error.

        So the error is right also where the ranks of a host add before they round. A block of 256 values with a NaN or
        an infinity is not rounded, and leaves no error."""
        error = self.errors.get(name)
        if error is None or error.shape != gradient.shape or error.device != gradient.device:
            error = self.errors[name] = torch.zeros_like(gradient)
        if gradient.is_cpu:
            _native.feed_error(gradient, error)
        else:
            feed_on_device(gradient, error)


def feed_on_device(gradient: torch.Tensor, error: torch.Tensor) -> None:
    """Do as `_native.feed_error`, by operations of torch, on any device."""
    gradient += error
    padding = -gradient.numel() % BLOCK
    blocks = torch.nn.functional.pad(gradient.flatten(), (0, padding)).view(-1, BLOCK)
    peak = blocks.abs().amax(1, keepdim=True)
    steps = torch.where(peak < 2.0**-100, 0.0, (blocks * (127.0 / peak)).round())
    sent = torch.where(peak.isfinite(), steps * (peak * float.fromhex("0x1.020404p-7")), blocks)
    error.copy_((blocks - sent).nan_to_num(0.0, 0.0, 0.0).flatten()[: gradient.numel()].view_as(error))
    gradient.copy_(sent.flatten()[: gradient.numel()].view_as(gradient))
