"""Package that a process with this folder on its path imports as `petastorm`: it installs compat and gives way."""

import importlib
import sys

# After this file has run, the import system returns the module that is in sys.modules.
del sys.modules["petastorm"]
importlib.import_module("farandole.compat").install()
importlib.import_module("petastorm")
