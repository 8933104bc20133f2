"""Tools of all other packages: errors, checks of input, files, HDF5, locks, memory, progress, registry."""
