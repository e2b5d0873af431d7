"""The configuration files, as a package so that they travel with the installed suite."""
