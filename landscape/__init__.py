"""Train with distributed SGD, decompose every step, and map the loss landscape around what it finds.

The public names stand in ``__init__.pyi``. A name is imported when it is first used: ``import landscape``
alone takes milliseconds.
"""

from landscape.core import lazy

#: Former public name -> today's, for one minor version: that after which they go.
_FORMER = {
    "Ends": "ExtremeEigenvalues",
    "FailedError": "OperationError",
    "NoiseEstimate": "Noise",
    "estimate_noise": "noise",
}
_FORMER_UNTIL = "0.19"

_MODULES, __getattr__, __dir__ = lazy(__name__, __file__, _FORMER, _FORMER_UNTIL)
__all__ = list(_MODULES)
