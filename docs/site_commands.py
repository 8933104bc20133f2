"""The commands as attributes for sphinx-click, made before Sphinx changes the functions that it documents."""

from landscape.cli import as_command
from landscape.core import registry

globals().update({name: as_command(registry.commands[name]) for name in registry.commands.names()})
