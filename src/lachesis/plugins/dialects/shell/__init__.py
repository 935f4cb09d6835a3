"""Reader of shell scripts: their commands, expanded as bash does, without running anything."""
