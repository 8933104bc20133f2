"""Conformance checks for update rules, optimizers, topologies, instruments, analyses, drawings and commands.

Each function checks one thing against what the rest of the toolkit relies on, in the manner of scikit-learn's
``check_estimator``: it is given tiny settings, values that must be refused and, where there is one, a truth.
The package's own entries go through the same checks, in tests/test_conformance.py::

    import landscape.testing

    def test_my_rule():
        landscape.testing.check_rule(MyRule, {"period": 3}, refused={"period": 0})

``landscape doctor --device`` compares the calls of the package on a device with those on the CPU, which
:mod:`landscape.testing.device` lists.

A check that fails raises an AssertionError with the name of the check. ``only`` names one check to run, of
those in :data:`CHECKS`, such as for ``pytest.mark.parametrize``; ``device`` is where it is computed.
"""

from landscape.testing.checks import CHECKS, Truth, check_analysis, check_command, check_drawing
from landscape.testing.training import check_instrument, check_optimizer, check_rule, check_topology

__all__ = [
    "CHECKS",
    "Truth",
    "check_analysis",
    "check_command",
    "check_drawing",
    "check_instrument",
    "check_optimizer",
    "check_rule",
    "check_topology",
]
