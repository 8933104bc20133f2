"""What every room uses: errors, checks of input, files and HDF5, locks, memory, progress bars."""
