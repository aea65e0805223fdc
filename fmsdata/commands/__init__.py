"""The commands of `fmsdata`, one a file. `fmsdata.cli` gathers them."""
