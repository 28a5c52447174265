"""Package that a process with this folder on its path imports as `petastorm`: it installs compat and gives way."""

from farandole_answers import answer

answer(__name__)
