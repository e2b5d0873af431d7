"""What another project would import: operations, layers, decoders and their states. No data and no configuration."""
