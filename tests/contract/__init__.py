"""One suite that every store passes."""
