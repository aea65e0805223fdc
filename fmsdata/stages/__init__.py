"""The stages of a pipeline, one file each."""
