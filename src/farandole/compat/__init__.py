"""Compatibility layer: programs written for Horovod run unchanged, with `import horovod`, `sparkdl` and `petastorm`.

python -m farandole.compat train.py        # one program, also below `farandole run -np N`
horovodrun -np 2 python train.py           # Horovod's command

A program can also call `farandole.compat.install()` in its first lines.
"""

from farandole.compat.hook import install, uninstall

__all__ = ["install", "uninstall"]
