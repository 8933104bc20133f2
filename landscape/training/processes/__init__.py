"""The processes of a run: start, rendezvous, exchanges, end."""
