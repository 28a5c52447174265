"""Programs written for Horovod run unchanged: `import horovod...` and `import sparkdl...` answered by farandole.

python -m farandole.compat train.py        # a program, also below `farandole run -np N`
horovodrun -np 2 python train.py           # Horovod's command, which needs nothing else

or, in a program's first lines, `farandole.compat.install()`.
"""

from farandole.compat.hook import install, uninstall

__all__ = ["install", "uninstall"]
