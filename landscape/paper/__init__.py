"""The figures and tables of the papers: runs, drawings, verdicts, and the gallery that shows them."""
