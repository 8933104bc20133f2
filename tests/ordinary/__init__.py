"""First uses as people write them, each with the outcome that it must have: python -m tests.ordinary."""
