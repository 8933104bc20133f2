"""One self-contained page about runs and results: ``landscape report``.

:mod:`.contents` reads the files, and :mod:`.page` shows them with the template of this folder: the pictures
of :mod:`landscape.plots`, the descriptions of the results as tables, and what the files say of their origin.
Surfaces can be turned, which Plotly.js draws. No request leaves the page.
"""
