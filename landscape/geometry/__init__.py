"""What is computed on finished surfaces: basins, merge trees, regions, profiles, and files for ParaView."""
