"""A worked example of a plugin of landscape."""
