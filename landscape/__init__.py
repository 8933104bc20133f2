"""Train with distributed SGD, decompose every step, and map the loss landscape around what it finds.

The public names stand in ``__init__.pyi``. A name is imported when it is first used: ``import landscape``
alone takes milliseconds.
"""

from landscape.core import lazy

_MODULES, __getattr__, __dir__ = lazy(__name__, __file__)
__all__ = list(_MODULES)
