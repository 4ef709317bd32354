"""The axes of parallelism and the settings of layers, one module each, in the order in which they are applied."""
