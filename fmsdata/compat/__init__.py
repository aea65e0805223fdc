"""Drop-in replacements for the loaders of other projects."""
