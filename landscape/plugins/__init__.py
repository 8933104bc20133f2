"""Foundations of packages of one's own: base classes, registries, checks of options, parts of pictures.

A package adds names to the registries in the module that its entry point of the group "landscape.plugins"
names. The names of this module stand in ``__init__.pyi``; each is imported when it is used, so that an entry
point that declares names takes no time.
"""

from landscape.core import lazy
from landscape.core import registry as registry

_modules, __getattr__, __dir__ = lazy(__name__, __file__)
__all__ = list(_modules)
