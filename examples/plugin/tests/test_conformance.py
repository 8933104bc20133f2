"""The names of this package pass the checks that landscape has for its own (``pytest examples/plugin``)."""

from landscape.testing import check_command, check_rule


def test_the_rule() -> None:
    # Clipped steps do not run away above the stability limit.
    check_rule("clipped-ssgd", {"max_norm": 0.5}, refused={"max_norm": -1.0}, sharp=False)


def test_the_command() -> None:
    refused = {"--samples": ["--samples", "x"]}
    check_command("two-moons", ["{folder}/moons.csv", "--samples", 10], refused=refused)
