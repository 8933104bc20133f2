"""Computations on finished surfaces: basins, merge trees, regions, profiles, and files for ParaView."""
