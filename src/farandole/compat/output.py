"""Output of ranks as `horovodrun` and `horovod.run` print it, for programs that read it."""

from datetime import datetime

from farandole.launch.output import Output

__all__ = ["HorovodOutput"]


class HorovodOutput(Output):
    """Prints each line of each rank as "[rank]<stdout>:line" or "[rank]<stderr>:line"."""

    def heading(self, rank: int, stream: str) -> str:
        """Return "[0]<stdout>:"."""
        return f"[{rank}]<{stream}>:"

    def stamp(self, now: datetime) -> str:
        """Return the time as Horovod spells it: "Fri Jan 10 10:00:00 2020"."""
        return now.strftime("%a %b %d %H:%M:%S %Y")
