"""The papers' figures and tables, and our own: one file for each paper and theme."""
