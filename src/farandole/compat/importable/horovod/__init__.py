"""Package that a process with this folder on its path imports as `horovod`: it installs compat and gives way to it."""

from farandole_answers import answer

answer(__name__)
