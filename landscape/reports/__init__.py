"""One self-contained page about runs, checkpoints and results: ``landscape report``.

:mod:`.contents` reads the files, the modules named after sections turn them into the sections of
:mod:`.parts`, and :mod:`.page` renders these with the template of this folder. The page's script draws the
charts with Plotly.js. No request leaves the page.
"""
