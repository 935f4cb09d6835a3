"""What every room uses and what knows of none: records, errors, deadlines, files, imports, processes. No torch here."""
