"""Gradients of many learners and of minibatches, and their noise."""
