"""Package that a process with this folder on its path imports as `sparkdl`: it installs compat and gives way to it."""

import importlib
import sys

# After this file has run, the import system returns the module that is in sys.modules.
del sys.modules["sparkdl"]
importlib.import_module("farandole.compat").install()
importlib.import_module("sparkdl")
