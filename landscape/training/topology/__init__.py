"""The topologies by which learners average with each other."""
