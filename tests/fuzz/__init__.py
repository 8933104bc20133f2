"""Damaged and hostile files for every reader, in processes with limits on time and memory."""
