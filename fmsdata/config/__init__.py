"""Configuration: YAML is read, validated, and turned into stages."""
