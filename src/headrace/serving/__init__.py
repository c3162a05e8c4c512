"""An OpenAI-compatible server around one model: its gate, its life, its protocol. Started by `headrace.cli.serve`.

Import what is needed from the modules: this package imports nothing, so that a port can be opened before torch is.
"""

__all__: list[str] = []
