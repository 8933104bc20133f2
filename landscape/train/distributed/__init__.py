"""The processes of a run: starting them, meeting, exchanging, ending."""
