"""Names that other loaders' users know, over Headrace's own objects: `headrace.compat.sglang` and `headrace.compat.runai`. Imports neither."""
