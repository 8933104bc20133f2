"""The papers' figures and tables, and ours beside them: one file a paper and theme."""
