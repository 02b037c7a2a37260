"""Runs to look at: `tandem view`, `tandem report` and `tandem plot`.

For anyone who wants to see curves, episodes and tokens. It reads the files of run folders and knows
neither models nor torch; every text of a model is hostile to it. docs/guide/view.md has the pages.

    cli.py                  the three commands
    app.py, static/         the server and its pages
    runs.py                 runs below a folder, and their columns of numbers
    episodes.py, episode.py every episode of a run; one of them with its tokens
    report.py, svg.py, png.py  a run as one HTML file; curves as pictures

It plugs in as commands of tandem/registry.py. Pictures in PNG need the extra `png`.
"""
