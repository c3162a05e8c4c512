"""Names that other loaders' users know, over Headrace's own objects: `headrace.compat.sglang` and `headrace.compat.runai`. Imports neither of those loaders.

`headrace.compat.standin` puts the latter in the place of Run:ai's package, for programs that know only that; ``python -m headrace.compat`` runs one so.
"""
