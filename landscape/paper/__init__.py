"""The figures and tables of the papers: runs, drawings, verdicts, and the pages that show them."""
