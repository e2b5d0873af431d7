"""Operations, layers, decoders and their states, for use in other projects. No data and no configuration."""
