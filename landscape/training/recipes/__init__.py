"""Recipes: all settings of a run, and the built-in ones."""
