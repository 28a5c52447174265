"""Package that a process with this folder on its path imports as `horovod`: it installs compat and gives way to it."""

import importlib

importlib.import_module("farandole_answers").answer(__name__)
