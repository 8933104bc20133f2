"""Decentralised training in a loop of the user's own: one learner a process, any torch optimizer."""
