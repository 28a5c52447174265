"""Package that a process with this folder on its path imports as `petastorm`: it installs compat and gives way."""

import importlib

importlib.import_module("farandole_answers").answer(__name__)
