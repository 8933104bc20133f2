"""Training loops of the user's own: recorded, or decentralised over processes."""
