"""The commands. `headrace.cli.main.run` is the entry; nothing here is imported by other packages."""

__all__: list[str] = []
