"""The stages of a pipeline, one file or folder each."""
