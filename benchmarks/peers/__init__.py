"""fmsdata beside other loaders: the same corpus, measured in the same way, and the same accidents."""
