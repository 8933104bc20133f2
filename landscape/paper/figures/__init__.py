"""The papers' figures and tables, and our own: one file a paper and theme."""
