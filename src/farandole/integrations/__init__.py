"""Integrations with other tools, each a module to import on its own."""
