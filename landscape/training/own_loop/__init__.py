"""Training loops of the user's own: recorded, or decentralized over processes."""
